/* First process of a pod: holds its namespaces, reaps its orphans, leaves when told to. */
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int number) { (void)number; _exit(0); }

static void reap(int number) {
    (void)number;
    while (waitpid(-1, 0, WNOHANG) > 0) {}
}

int main(void) {
    struct sigaction leaving = {.sa_handler = leave};
    struct sigaction reaping = {.sa_handler = reap, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGINT, &leaving, 0);
    sigaction(SIGTERM, &leaving, 0);
    sigaction(SIGCHLD, &reaping, 0);
    for (;;) pause();
}
