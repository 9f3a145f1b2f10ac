/* NVML: how GPUs reach each other. */
#define _GNU_SOURCE
#include "libnvidia-ml.h"

#include <stdio.h>
#include <string.h>

enum { TO_GPU = 0, TO_SWITCH = 2 };
enum { P2P_OK = 0, P2P_CHIPSET_NOT_SUPPORTED = 1, P2P_INDICES = 6 };
enum { FABRIC_COMPLETED = 3 };
enum { INTERNAL = 0, SINGLE = 10, MULTIPLE = 20, HOSTBRIDGE = 30, NODE = 40, SYSTEM = 50 };

/* ---- one GPU's NVLinks ---- */

/* What is at the other end of a link; the answer is kept in `reply`. */
static nvmlReturn_t read_nvlink(nvmlDevice_t device, unsigned int link, const char *call, char *reply, size_t size)
{
    char members[160];
    nvmlReturn_t result = kyb_nvml_check(device, call);
    if (result != NVML_SUCCESS)
        return result;
    kyb_nvml_naming(members, sizeof members, "gpu", device->uuid);
    snprintf(members + strlen(members), sizeof members - strlen(members), ", \"link\": %u", link);
    if (device->parent)
        return NVML_ERROR_NOT_SUPPORTED;
    if (kyb_call("nvlink", members, reply, size) != 0)
        return NVML_ERROR_UNKNOWN;
    long long count = kyb_int(reply, "count", 0);
    if (count == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    return link < (unsigned long long)count ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link, unsigned int *active)
{
    char reply[512];
    nvmlReturn_t result = read_nvlink(device, link, __func__, reply, sizeof reply);
    if (result == NVML_SUCCESS && !active)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *active = 1;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int link, nvmlPciInfo_t *pci)
{
    char reply[512], address[32];
    nvmlReturn_t result = read_nvlink(device, link, __func__, reply, sizeof reply);
    if (result == NVML_SUCCESS && !pci)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result != NVML_SUCCESS)
        return result;
    kyb_text(reply, "pci_bus_id", address, sizeof address);
    kyb_nvml_pci(address, pci);
    return NVML_SUCCESS;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int link, unsigned int *type)
{
    char reply[512];
    nvmlReturn_t result = read_nvlink(device, link, __func__, reply, sizeof reply);
    if (result == NVML_SUCCESS && !type)
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *type = kyb_int(reply, "switched", 0) ? TO_SWITCH : TO_GPU;
    return result;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned int link, unsigned int capability,
                                                      unsigned int *has)
{
    char reply[512];
    nvmlReturn_t result = read_nvlink(device, link, __func__, reply, sizeof reply);
    if (result == NVML_SUCCESS && (!has || capability > 5))
        result = NVML_ERROR_INVALID_ARGUMENT;
    if (result == NVML_SUCCESS)
        *has = 1;
    return result;
}

/* Hopper and later know of their fabric; the clique is the same for all GPUs of one machine. */
KYB_EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info)
{
    struct kyb_reading reading;
    char reply[512], name[96];
    nvmlReturn_t result = kyb_nvml_read(device, __func__, &reading);
    if (result != NVML_SUCCESS)
        return result;
    kyb_text(reading.device, "name", name, sizeof name);
    kyb_nvml_done(&reading);
    if (!info)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != KYB_VERSION_OF(nvmlGpuFabricInfo_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    result = read_nvlink(device, 0, __func__, reply, sizeof reply);
    if (result != NVML_SUCCESS || !kyb_int(reply, "switched", 0) || !strstr(name, "H100"))
        return NVML_ERROR_NOT_SUPPORTED;
    memset(info->clusterUuid, 0, sizeof info->clusterUuid);
    info->status = NVML_SUCCESS;
    info->cliqueId = 0;
    memset(&info->state, 0xFF, sizeof info->healthMask); /* it is one byte; who reads more reads what lies behind it */
    info->state = FABRIC_COMPLETED;
    info->healthMask = 0;
    return NVML_SUCCESS;
}

/* ---- two GPUs ---- */

static nvmlReturn_t read_pair(nvmlDevice_t a, nvmlDevice_t b, const char *call, char *reply, size_t size)
{
    char members[320], other[160];
    nvmlReturn_t result = kyb_nvml_check(a, call);
    if (result == NVML_SUCCESS)
        result = kyb_nvml_check(b, call);
    if (result != NVML_SUCCESS)
        return result;
    kyb_nvml_naming(members, sizeof members, "a", a->uuid);
    kyb_nvml_naming(other, sizeof other, "b", b->uuid);
    snprintf(members + strlen(members), sizeof members - strlen(members), ", %s", other);
    return kyb_call("link", members, reply, size) == 0 ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static unsigned int level_number(const char *level)
{
    static const struct {
        const char *name;
        unsigned int number;
    } levels[] = {{"PIX", SINGLE}, {"PXB", MULTIPLE}, {"PHB", HOSTBRIDGE}, {"NODE", NODE}, {"SYS", SYSTEM}};
    for (size_t index = 0; index < sizeof levels / sizeof *levels; index++) {
        if (strcmp(levels[index].name, level) == 0)
            return levels[index].number;
    }
    return SYSTEM;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, unsigned int *level)
{
    char reply[512], name[16];
    if (!level)
        return NVML_ERROR_INVALID_ARGUMENT;
    *level = INTERNAL;
    if (a == b)
        return kyb_nvml_check(a, __func__);
    nvmlReturn_t result = read_pair(a, b, __func__, reply, sizeof reply);
    if (result != NVML_SUCCESS)
        return result;
    kyb_text(reply, "level", name, sizeof name);
    *level = level_number(name);
    return NVML_SUCCESS;
}

KYB_EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, unsigned int index, unsigned int *status)
{
    char reply[512];
    if (!status || index >= P2P_INDICES)
        return NVML_ERROR_INVALID_ARGUMENT;
    nvmlReturn_t result = read_pair(a, b, __func__, reply, sizeof reply);
    if (result == NVML_SUCCESS)
        *status = kyb_int(reply, "p2p", 0) ? P2P_OK : P2P_CHIPSET_NOT_SUPPORTED;
    return result;
}
