"""What runs or reads hostile input, apart from the trainer. This package imports nothing of `arpo`.

child.py is a process that parses what strangers wrote: chat templates, formulas, pages (parser_jail.py confines it).

All other files are the sandbox in which model-written Python runs: one host process per rank, one fork of it per call.

    trainer rank                            host (jailed once, numpy and sympy loaded, clean environment)
    client.py  == control socket, 1 fd per call ==>  host.py, the zygote: never reads a request, only keeps spares
        |                                               supervisor.py, S: enforces the limits, replies
        +<============= one socket per call =============>   worker.py, W: the model's code; fds 0, 1, 2 only

A package that CallLimits.sessions names can make a supervisor serve many calls, whose worker lives on between them.

Tiers, tried at start: namespaces.py (user, mount, pid, net, ipc namespaces), landlock.py (Landlock, if a container
forbids namespaces), each with seccomp.py; else nothing runs, unless the user accepts rlimits alone (folder.py, which
documents the methods of all three). In each of them a call has a cgroup of its own where one can be had (cgroup.py).

The host imports this package as `jail`, without `arpo`: keep it to the standard library and relative imports.
"""
