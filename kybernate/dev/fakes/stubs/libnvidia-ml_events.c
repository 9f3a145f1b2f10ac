/* NVML: XID events. A set begins where the daemon's list of events ends when it is made. */
#define _GNU_SOURCE
#include "libnvidia-ml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define XID_EVENT 0x8ULL
#define MAX_REGISTERED 64

struct kyb_event_set {
    long long after;
    nvmlDevice_t registered[MAX_REGISTERED];
    int count;
};
typedef struct kyb_event_set *nvmlEventSet_t;

static long long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

static int ask(long long after, long long timeout_ms, char *reply)
{
    char members[96];
    snprintf(members, sizeof members, "\"timeout_ms\": %lld", timeout_ms);
    if (after >= 0)
        snprintf(members + strlen(members), sizeof members - strlen(members), ", \"after\": %lld", after);
    return kyb_call("wait_xid", members, reply, KYB_REPLY_SIZE);
}

KYB_EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result != NVML_SUCCESS)
        return result;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlEventSet_t made = calloc(1, sizeof *made);
    char *reply = malloc(KYB_REPLY_SIZE);
    if (!made || !reply)
        result = NVML_ERROR_MEMORY;
    else if (ask(-1, 0, reply) != 0)
        result = NVML_ERROR_UNKNOWN;
    if (result == NVML_SUCCESS) {
        made->after = kyb_int(reply, "last", 0);
        *set = made;
    } else {
        free(made);
    }
    free(reply);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return set ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && (!types || device->parent))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *types = XID_EVENT;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    nvmlReturn_t result = kyb_nvml_check(device, __func__);
    if (result == NVML_SUCCESS && (!set || device->parent || set->count == MAX_REGISTERED))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS && (types & ~XID_EVENT))
        result = NVML_ERROR_NOT_SUPPORTED;
    if (result == NVML_SUCCESS)
        set->registered[set->count++] = device;
    return result;
}

static int is_registered(nvmlEventSet_t set, nvmlDevice_t device)
{
    for (int index = 0; index < set->count; index++) {
        if (set->registered[index] == device)
            return 1;
    }
    return 0;
}

/* The next event of the answer that this set is for; 0: none. Events of others are passed over. */
static int take(nvmlEventSet_t set, const char *reply, nvmlEventData_t *data)
{
    const char *events = kyb_member(reply, "events");
    for (int index = 0, count = kyb_count(events); index < count; index++) {
        const char *event = kyb_element(events, index);
        char uuid[96];
        int placed = kyb_text(event, "gpu", uuid, sizeof uuid) == 0;
        nvmlDevice_t device = placed ? kyb_nvml_find(uuid) : NULL;
        nvmlDevice_t gpu = device && device->parent ? device->parent : device;
        set->after = kyb_int(event, "number", set->after);
        if (placed && !is_registered(set, gpu))
            continue;
        int in_instance = device && device->parent;
        data->device = gpu;
        data->eventType = XID_EVENT;
        data->eventData = (unsigned long long)kyb_int(event, "xid", 0);
        data->gpuInstanceId = in_instance ? (unsigned int)device->gpu_instance : KYB_NO_INSTANCE;
        data->computeInstanceId = in_instance ? (unsigned int)device->compute_instance : KYB_NO_INSTANCE;
        return 1;
    }
    return 0;
}

/* NVML_ERROR_GPU_IS_LOST if one of the set's GPUs is: as on real drivers the whole set is spoiled then. */
static nvmlReturn_t check_all(nvmlEventSet_t set, const char *call)
{
    nvmlReturn_t result = NVML_SUCCESS;
    for (int index = 0; index < set->count && result == NVML_SUCCESS; index++)
        result = kyb_nvml_check(set->registered[index], call);
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    nvmlReturn_t result = kyb_nvml_ready();
    if (result == NVML_SUCCESS && (!set || !data))
        result = NVML_ERROR_INVALID_ARGUMENT;
    char *reply = result == NVML_SUCCESS ? malloc(KYB_REPLY_SIZE) : NULL;
    if (result != NVML_SUCCESS || !reply)
        return result == NVML_SUCCESS ? NVML_ERROR_MEMORY : result;
    long long end = now_ms() + timeout_ms;
    do {
        nvmlReturn_t state = check_all(set, __func__); /* before asking: what happened comes before the word of a loss */
        long long left = state == NVML_SUCCESS ? end - now_ms() : 0;
        if (ask(set->after, left > 0 ? left : 0, reply) != 0)
            result = NVML_ERROR_UNKNOWN;
        else if (take(set, reply, data))
            break;
        else if (state != NVML_SUCCESS)
            result = state;
        else if (end <= now_ms())
            result = NVML_ERROR_TIMEOUT;
    } while (result == NVML_SUCCESS);
    free(reply);
    return result;
}
