/*
 * A libcuda.so.1 without a driver behind it: writes down how it was called, and answers what a file says.
 * $RECORDER_FOLDER/calls: one line per call: name, pid, arguments in hex, caller. $RECORDER_FOLDER/results: lines "name code [value]".
 * "name absent" hides a function from cuGetProcAddress; "name wait" answers only once $RECORDER_FOLDER/go
 * exists, "name crash" ends the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static FILE *file(const char *name, const char *mode)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", getenv("RECORDER_FOLDER"), name);
    return fopen(path, mode);
}

/* The word after the name, and a number after that. */
static int lookup(const char *name, char *word, int *value)
{
    char line[256], key[128];
    int found = 0;
    FILE *results = file("results", "r");
    while (results && fgets(line, sizeof line, results)) {
        int number = 0;
        char text[64];
        if (sscanf(line, "%127s %63s %d", key, text, &number) >= 2 && strcmp(key, name) == 0) {
            strcpy(word, text);
            *value = number;
            found = 1;
        }
    }
    if (results)
        fclose(results);
    return found;
}

static int answer(const char *name, int pid, const void *arguments, size_t size, int *value)
{
    char word[64] = "0";
    int number = 0;
    char line[8192];
    int length = snprintf(line, 256, "%s %d %s", name, pid, arguments ? "" : size ? "NULL" : "-");
    for (size_t index = 0; arguments && index < size; index++)
        length += snprintf(line + length, 3, "%02x", ((const unsigned char *)arguments)[index]);
    FILE *calls = file("calls", "a");
    fprintf(calls, "%s %d\n", line, getpid()); /* one write: several processes may use this folder */
    fclose(calls);
    lookup(name, word, &number);
    if (value)
        *value = number;
    if (strcmp(word, "crash") == 0)
        abort();
    if (strcmp(word, "wait") == 0) {
        FILE *go;
        while (!(go = file("go", "r")))
            usleep(1000);
        fclose(go);
    }
    return atoi(word);
}

EXPORT int cuInit(unsigned int flags)
{
    printf("a library that prints\n");
    fflush(stdout);
    return answer("cuInit", (int)flags, NULL, 0, NULL);
}

EXPORT int cuDriverGetVersion(int *version)
{
    int code = answer("cuDriverGetVersion", 0, NULL, 0, version);
    if (*version == 0)
        *version = 13000;
    return code;
}

#ifndef OLD
EXPORT int cuCheckpointProcessGetState(int pid, int *state)
{
    return answer(__func__, pid, NULL, 0, state);
}

EXPORT int cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    return answer(__func__, pid, NULL, 0, tid);
}

EXPORT int cuCheckpointProcessLock(int pid, void *arguments)
{
    return answer(__func__, pid, arguments, 64, NULL);
}

EXPORT int cuCheckpointProcessCheckpoint(int pid, void *arguments)
{
    return answer(__func__, pid, arguments, 64, NULL);
}

EXPORT int cuCheckpointProcessRestore(int pid, void *arguments)
{
    void *pairs = NULL;
    unsigned int count = 0;
    if (arguments) {
        memcpy(&pairs, arguments, sizeof pairs);
        memcpy(&count, (char *)arguments + sizeof pairs, sizeof count);
    }
    answer("pairs", pid, pairs, 32 * (size_t)count, NULL);
    if (arguments) /* the address itself is of no interest */
        return answer(__func__, pid, (char *)arguments + sizeof pairs, 64 - sizeof pairs, NULL);
    return answer(__func__, pid, NULL, 64, NULL);
}

EXPORT int cuCheckpointProcessUnlock(int pid, void *arguments)
{
    return answer(__func__, pid, arguments, 64, NULL);
}
#endif

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    char word[64] = "";
    int number;
    Dl_info self;
    (void)version, (void)flags;
    dladdr((void *)cuGetProcAddress_v2, &self);
    void *library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    *function = lookup(name, word, &number) && strcmp(word, "absent") == 0 ? NULL : dlsym(library, name);
    if (status)
        *status = *function ? 0 : 1;
    return *function || status ? 0 : 500;
}
