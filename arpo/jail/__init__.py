"""Isolated processes for hostile input, separate from the trainer. This package imports nothing of `arpo`.

child.py is a process for parsing untrusted text: chat templates, formulas, pages (parser_jail.py confines it).

All other files are the sandbox for model-written Python: one host process per rank, and one fork of the host per call.

    trainer rank                            host (jailed once, numpy and sympy loaded, clean environment)
    client.py  == control socket, 1 fd per call ==>  host.py, the zygote: never reads a request, only keeps spares
        |                                               supervisor.py, S: enforces the limits, replies
        +<============= one socket per call =============>   worker.py, W: the model's code; fds 0, 1, 2 only

CallLimits.sessions names a package for sessions. In a session a supervisor serves many calls, and the worker lives on
between the calls.

Three tiers are tried at start: namespaces.py (user, mount, pid, net, ipc namespaces), then landlock.py (Landlock, if a
container forbids namespaces), both with seccomp.py. The third, folder.py, has only rlimits and needs the user's
consent; without consent nothing runs. folder.py documents the methods of all three. In every tier each call gets a
separate cgroup, if the machine allows cgroups (cgroup.py).

The host imports this package as `jail`, without `arpo`: use only the standard library and relative imports.
"""
