/* Stands in the process tree for a process that a fork server forks; see __init__.py.

   stub SOCKET WAIT_S MODULES COMMAND...

   Hands its descriptors to the server, passes signals on, and ends as the forked process does. If
   the server does not fork, or does not answer for WAIT_S seconds, it becomes the command itself. */

#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_FDS = 250 };  /* the kernel takes 253 in one message */

static int server = -1;

static void pass_on(int signum) {
    int before = errno;
    unsigned char number = (unsigned char)signum;
    send(server, &number, 1, MSG_NOSIGNAL);
    errno = before;
}

/* All descriptors that this process inherited; -1 = more than can be sent. */
static int inherited(int *fds) {
    DIR *folder = opendir("/proc/self/fd");
    if (!folder) return -1;
    int count = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        int fd = atoi(entry->d_name);
        if (entry->d_name[0] == '.' || fd == server || fd == dirfd(folder)) continue;
        if (count == MAX_FDS) { count = -1; break; }
        fds[count++] = fd;
    }
    closedir(folder);
    return count;
}

static int ask(const char *path, const int *fds, int count) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return -1;
    strcpy(address.sun_path, path);
    if (connect(server, (struct sockaddr *)&address, sizeof address)) return -1;
    union { struct cmsghdr header; char space[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control;
    struct iovec numbers = {(void *)fds, (size_t)count * sizeof *fds};
    struct msghdr message = {.msg_iov = &numbers, .msg_iovlen = 1};
    message.msg_control = &control;
    message.msg_controllen = CMSG_SPACE((size_t)count * sizeof *fds);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN((size_t)count * sizeof *fds);
    memcpy(CMSG_DATA(header), fds, (size_t)count * sizeof *fds);
    return sendmsg(server, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

/* How long each call on the server's socket may take; 0 = for ever. */
static void wait_at_most(double wait_s) {
    struct timeval limit = {(time_t)wait_s, (suseconds_t)((wait_s - (time_t)wait_s) * 1e6)};
    setsockopt(server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(server, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);  /* connect, too */
}

static ssize_t answer(char *text, size_t size) {
    ssize_t got;
    while ((got = recv(server, text, size - 1, 0)) < 0 && errno == EINTR);
    text[got < 0 ? 0 : got] = 0;
    return got;
}

static void end_by(int signum) {
    struct rlimit none = {0, 0};
    sigset_t all;
    setrlimit(RLIMIT_CORE, &none);
    signal(signum, SIG_DFL);
    sigfillset(&all);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    raise(signum);
    _exit(128 + signum);
}

int main(int argc, char **argv) {
    int fds[MAX_FDS];
    char text[512];
    if (argc < 5) return 2;
    strncpy(text, argv[1], sizeof text - 1);
    text[sizeof text - 1] = 0;
    int count;
    do {
        if (server >= 0) close(server);
        server = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        wait_at_most(atof(argv[2]));
        count = inherited(fds);
        if (count < 1 || ask(text, fds, count) || answer(text, sizeof text) < 1) text[0] = 0;
    } while (text[0] == '/');  /* the socket of another server */
    if (text[0] != 'A') {
        const char *owner = getenv("TESTBED_FORK_OWNER");
        if (owner && kill(atoi(owner), 0) && errno == ESRCH)
            return 143;  /* as if it had been ended with its owner */
        execvp(argv[4], argv + 4);
        perror(argv[4]);
        return 127;
    }
    wait_at_most(0);
    for (int i = 0; i < count; i++) close(fds[i]);
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART}, now;
    for (int signum = 1; signum < NSIG; signum++) {
        int own = signum == SIGILL || signum == SIGBUS || signum == SIGFPE || signum == SIGSEGV;
        if (own || signum == SIGCHLD || sigaction(signum, NULL, &now)) continue;
        if (now.sa_handler == SIG_DFL) sigaction(signum, &action, NULL);
    }
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (answer(text, sizeof text) < 2) end_by(SIGKILL);  /* as the forked process has ended */
    if (text[0] == 'E') return (unsigned char)text[1];
    end_by((unsigned char)text[1]);
}
