"""Numbers of the system calls in the filter. Columns: name, x86_64, aarch64 (- = the machine lacks the call)."""

from __future__ import annotations

NEWEST = 462
"""Last reviewed system call (mseal, Linux 6.10). Later calls and the x32 interface are refused."""

ADMINISTRATION = """
    ptrace 101 117           syslog 103 116           uselib 134 -             ustat 136 -
    sysfs 139 -              vhangup 153 58           modify_ldt 154 -         pivot_root 155 41
    _sysctl 156 -            adjtimex 159 171         chroot 161 51            acct 163 89
    settimeofday 164 170     mount 165 40             umount2 166 39           swapon 167 224
    swapoff 168 225          reboot 169 142           sethostname 170 161      setdomainname 171 162
    iopl 172 -               ioperm 173 -             create_module 174 -      init_module 175 105
    delete_module 176 106    get_kernel_syms 177 -    query_module 178 -       quotactl 179 60
    nfsservctl 180 42        lookup_dcookie 212 18    clock_settime 227 112    mbind 237 235
    set_mempolicy 238 237    get_mempolicy 239 236    kexec_load 246 104       add_key 248 217
    request_key 249 218      keyctl 250 219           inotify_init 253 -       migrate_pages 256 238
    unshare 272 97           vmsplice 278 75          move_pages 279 239       inotify_init1 294 26
    perf_event_open 298 241  fanotify_init 300 262    name_to_handle_at 303 264
    open_by_handle_at 304 265  clock_adjtime 305 266  setns 308 268            process_vm_readv 310 270
    process_vm_writev 311 271  kcmp 312 272           finit_module 313 273     kexec_file_load 320 294
    bpf 321 280              userfaultfd 323 282     io_uring_setup 425 425   io_uring_enter 426 426
    io_uring_register 427 427  open_tree 428 428      move_mount 429 429       fsopen 430 430
    fsconfig 431 431         fsmount 432 432          fspick 433 433           pidfd_getfd 438 438
    process_madvise 440 440  mount_setattr 442 442    quotactl_fd 443 443      process_mrelease 448 448
    io_setup 206 0           io_submit 209 2          setsid 112 157           bind 49 200
    listen 50 201            connect 42 203           accept 43 202            accept4 288 242
"""
"""System calls no honest computation needs. They fail with EPERM. The last ones are less obvious: io_* use up the
machine's AIO, setsid gives the process an extra share of the processor, and bind makes a name seen by other calls."""

OUTSIDE_THE_LIMITS = """
    shmget 29 194            shmat 30 196             shmctl 31 195            shmdt 67 197
    semget 64 190            semop 65 193             semctl 66 191            semtimedop 220 192
    msgget 68 186            msgsnd 69 189            msgrcv 70 188            msgctl 71 187
    mq_open 240 180          mq_unlink 241 181        mq_timedsend 242 182     mq_timedreceive 243 183
    mq_notify 244 184        mq_getsetattr 245 185    memfd_create 319 279     memfd_secret 447 447
    clone3 435 435           openat2 437 437
"""
"""System calls refused with ENOSYS. Most make memory outside all limits, or memory outliving its process. A filter
cannot see the flags of clone3 and openat2. The C library then uses clone, and does not need openat2."""

FLUSH = "sync 162 81  syncfs 306 267"
"""System calls able to stall the entire machine. The filter reports success and does nothing."""

ON_OTHERS = """
    chmod 90 -               fchmod 91 52             chown 92 -               fchown 93 55
    lchown 94 -              utime 132 -              utimes 235 -             futimesat 261 -
    fchownat 260 54          fchmodat 268 53          fchmodat2 452 452        utimensat 280 88
    setxattr 188 5           lsetxattr 189 6          fsetxattr 190 7          removexattr 197 14
    lremovexattr 198 15      fremovexattr 199 16      truncate 76 45           setpriority 141 140
    sched_setparam 142 118   sched_setscheduler 144 119  ioprio_set 251 30     sched_setattr 314 274
    tkill 200 130            rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240
    pidfd_send_signal 424 424  pidfd_open 434 434     execve 59 221            execveat 322 281
    sendmsg 46 211           sendmmsg 307 269
"""
"""System calls refused with EPERM if there are no namespaces. Most reach other files (Landlock does not cover metadata)
or other processes of the user. sendmsg can hide open files in a message to its sender."""

SINGLE = """
    socket 41 198            socketpair 53 199        mmap 9 222               personality 135 92
    ioctl 16 29              fcntl 72 25              clone 56 220             fork 57 -
    vfork 58 -               kill 62 129              tgkill 234 131           prlimit64 302 261
    sched_setaffinity 203 122  prctl 157 167         setsockopt 54 208        open 2 -
    openat 257 56            setrlimit 160 164        fallocate 285 47
"""

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> (AUDIT_ARCH constant, column in the tables)."""


def numbers(table: str, machine: str) -> dict[str, int]:
    """Return name -> number for one machine. Calls missing on this machine are left out."""
    words = table.split()
    column = ARCHITECTURES[machine][1]
    rows = [(words[start], words[start + 1 + column]) for start in range(0, len(words), 3)]
    return {name: int(number) for name, number in rows if number != "-"}
