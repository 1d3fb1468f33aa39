/* Preloaded into a process, ends it by SIGKILL at a chosen call among those that change files in one folder.
   A write that is chosen still writes its first half. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long calls, kill_at;

void count_calls_in(const char *path, long end_at) {
    strncpy(folder, path, sizeof folder - 1);
    calls = 0;
    kill_at = end_at;
}

long calls_so_far(void) { return calls; }

static int in_folder(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }

static int fd_in_folder(int fd) {
    char link[64], path[4096];
    if (!folder[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return in_folder(path);
}

static int is_chosen(void) { return __sync_add_and_fetch(&calls, 1) == kill_at; }

static void end(void) { kill(getpid(), SIGKILL); }

#define REAL(name) __typeof__(name) *real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define ON_PATH(name, parameters, path, arguments) \
    int name parameters { REAL(name); if (in_folder(path) && is_chosen()) end(); return real arguments; }
ON_PATH(rename, (const char *from, const char *to), to, (from, to))
ON_PATH(link, (const char *from, const char *to), to, (from, to))
ON_PATH(unlink, (const char *path), path, (path))
ON_PATH(mkdir, (const char *path, mode_t mode), path, (path, mode))
ON_PATH(rmdir, (const char *path), path, (path))
ON_PATH(truncate, (const char *path, off_t size), path, (path, size))

#define ON_FD(name, parameters, arguments) \
    int name parameters { REAL(name); if (fd_in_folder(fd) && is_chosen()) end(); return real arguments; }
ON_FD(fsync, (int fd), (fd))
ON_FD(fdatasync, (int fd), (fd))
ON_FD(close, (int fd), (fd))
ON_FD(ftruncate, (int fd, off_t size), (fd, size))
ON_FD(ftruncate64, (int fd, off64_t size), (fd, size))

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if (in_folder(path) && (flags & (O_CREAT | O_TRUNC)) && is_chosen()) end(); \
        return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
    int name(int at, const char *path, int flags, ...) { \
        REAL(name); va_list more; va_start(more, flags); mode_t mode = va_arg(more, mode_t); va_end(more); \
        if (in_folder(path) && (flags & (O_CREAT | O_TRUNC)) && is_chosen()) end(); \
        return real(at, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int fd, const void *content, size_t n) {
    REAL(write);
    if (fd_in_folder(fd) && is_chosen()) {
        real(fd, content, n / 2);
        end();
    }
    return real(fd, content, n);
}

#define PWRITE(name, type) \
    ssize_t name(int fd, const void *content, size_t n, type at) { \
        REAL(name); if (fd_in_folder(fd) && is_chosen()) { real(fd, content, n / 2, at); end(); } \
        return real(fd, content, n, at); }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)
