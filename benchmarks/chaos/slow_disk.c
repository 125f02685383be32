// Preloaded library that makes the disk of KV files slow: a file gets its name only after a delay.
// The delay in nanoseconds is read from a file that all processes share, which also counts.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

struct disk {
    volatile int64_t delay_ns;
    volatile int64_t num_delayed;
};

static struct disk* disk;
static int (*real_rename)(const char*, const char*);

__attribute__((constructor)) static void begin(void) {
    real_rename = (int (*)(const char*, const char*))dlsym(RTLD_NEXT, "rename");
    const char* path = getenv("CHAOS_DISK");
    if (!path) return;
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return;
    void* map = mmap(NULL, sizeof *disk, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) disk = map;
    close(file);
}

static int is_kv_file(const char* path) {
    size_t length = strlen(path);
    return length > 3 && !strcmp(path + length - 3, ".kv");
}

int rename(const char* from, const char* to) {
    int64_t delay_ns = disk && is_kv_file(to) ? disk->delay_ns : 0;
    if (delay_ns > 0) {
        struct timespec rest = {delay_ns / 1000000000LL, delay_ns % 1000000000LL};
        nanosleep(&rest, NULL);
        __atomic_add_fetch(&disk->num_delayed, 1, __ATOMIC_RELAXED);
    }
    return real_rename(from, to);
}
