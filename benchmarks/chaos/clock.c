// Preloaded library that shifts the wall clock of a process. The offset in nanoseconds is read from
// a file per process, which the test writes; a forked process has a file of its own. Other clocks
// are not affected.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t* off_ns;
static int (*real_gettime)(clockid_t, struct timespec*);

static void map_clock(void) {
    char path[4096];
    const char* folder = getenv("CHAOS_CLOCKS");
    off_ns = NULL;
    if (!folder) return;
    snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, sizeof *off_ns) == 0) {
        void* map = mmap(NULL, sizeof *off_ns, PROT_READ, MAP_SHARED, file, 0);
        if (map != MAP_FAILED) off_ns = map;
    }
    close(file);
}

__attribute__((constructor)) static void begin(void) {
    real_gettime = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
    map_clock();
    pthread_atfork(NULL, NULL, map_clock);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
    if (!real_gettime) real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_gettime(clock, now);
    if (!failed && off_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = now->tv_sec * 1000000000LL + now->tv_nsec + *off_ns;
        now->tv_sec = ns / 1000000000LL;
        now->tv_nsec = ns % 1000000000LL;
    }
    return failed;
}

int gettimeofday(struct timeval* now, void* zone) {
    (void)zone;
    struct timespec exact;
    int failed = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return failed;
}

time_t time(time_t* where) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (where) *where = exact.tv_sec;
    return exact.tv_sec;
}
