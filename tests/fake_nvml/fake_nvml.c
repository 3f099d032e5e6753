/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1: no test machine has a GPU, and with it the real NVML client code (pynvml)
 * runs on any machine. Only what training.host.gpus asks is here; every other function is missing, as in an old driver.
 *
 *   gcc -shared -fPIC -o DIR/libnvidia-ml.so.1 fake_nvml.c      then LD_LIBRARY_PATH=DIR
 *
 * FAKE_NVML_COUNT=2            GPUs                      FAKE_NVML_PID=4711     a process on GPU 0, with 1 GiB
 * FAKE_NVML_TOTAL_GIB=32       memory of each            FAKE_NVML_CAPABILITY=12.0
 * FAKE_NVML_FREE_GIB=31,5      free, one per GPU; the last value holds for the rest
 * FAKE_NVML_NOT_SUPPORTED=1    "not supported" for all but handle, UUID and name (as under MIG)
 * FAKE_NVML_LOST=2             bits of GPUs that are counted but do not answer: 1
 * FAKE_NVML_INIT=9             what nvmlInit returns (9: driver not loaded)      FAKE_NVML_SLEEP=60      seconds before
 *
 * What the monitor shows; a list has a value for each GPU, the last one holds for the rest:
 * FAKE_NVML_USE=97,100  %      FAKE_NVML_TEMPERATURE=71,64  °C      FAKE_NVML_POWER=431,70  W      FAKE_NVML_POWER_LIMIT=575  W
 * FAKE_NVML_USE_AT_FIRST=99  %, in the second after nvmlInit
 * FAKE_NVML_ENERGY=431,70  W, in the counter of energy, which older cards lack
 * FAKE_NVML_FAN=40  %          FAKE_NVML_NAME=NVIDIA GeForce RTX 5090
 * FAKE_NVML_PROCESSES=4711:21.5,4712:0.5;4713:20     pid and GiB of processes: on GPU 0; on GPU 1; …
 * FAKE_NVML_DISPLAYS=1200:0.4  those that draw
 *
 * FAKE_NVML_MIG=0,1            in parts, one on each GPU: MIG-00000000, MIG-00000001 …      FAKE_NVML_MIG_GIB=10   their memory
 *
 * FAKE_NVML_XID=1:79,0:31      errors to report as events: GPU and number, or `lost`, an error of the wait
 * FAKE_NVML_EVENTS=0           without events
 *
 * FAKE_NVML_VIRTUAL=0,2        1 passed through, 2 vGPU
 *
 * What only `--check` asks; a list has a value for each GPU, the last one holds for the rest:
 * FAKE_NVML_COMPUTE_MODE=0,3   default, 2 prohibited, 3 exclusive process
 * FAKE_NVML_REASONS=1,64       bits of why the clocks are low (1 idle, 4 power cap, 8/32/64/128 trouble)
 * FAKE_NVML_ECC=0,3            uncorrected memory errors                         FAKE_NVML_PERSISTENCE=1,0
 * FAKE_NVML_REMAP=0,1          rows to be remapped: 1 pending, 2 failed          FAKE_NVML_RETIRED=0,1   the same of older cards
 * FAKE_NVML_WIDTH=16,8         PCIe lanes (of WIDTH_MOST=16)                     FAKE_NVML_GENERATION=4  (of GENERATION_MOST=4)
 * FAKE_NVML_NVLINKS=4          links that are up, of four; -1: no NVLink         FAKE_NVML_TOPOLOGY=30   between all GPUs
 * FAKE_NVML_BRIDGES=1          they are bridges of two: 0 and 1, 2 and 3 …
 * FAKE_NVML_P2P=0              direct copies: 0 works, 1 to 5 the driver's reason why not
 * FAKE_NVML_POWER_DEFAULT=575  W                         FAKE_NVML_ECC_MODE=0,1 off, on
 * FAKE_NVML_BUS=0000:01:00.0   PCI address of GPU 0; missing as long as it is not set
 *
 * Compiled with -DOLD_DRIVER the newer of these functions are missing, as in drivers before 510.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, IS_LOST = 15 };
typedef struct { unsigned index; } Device;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned gpu, memory; } Load;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;

static Device devices[32];
static const char *variable(const char *name, const char *otherwise) { return getenv(name) ? getenv(name) : otherwise; }
static int number(const char *name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
static int supported(void) { return number("FAKE_NVML_NOT_SUPPORTED", 0) ? NOT_SUPPORTED : OK; }

/* From the value of GPU `index` in a list on. */
static const char *entry(const char *list, unsigned index) {
  for (; index && strchr(list, ','); index--) list = strchr(list, ',') + 1;
  return list;
}

static int listed(const char *name, unsigned index, const char *otherwise) { return atoi(entry(variable(name, otherwise), index)); }

static unsigned long long gib(const char *list, unsigned index) {
  return (unsigned long long)(atof(entry(list, index)) * (1ull << 30));
}

const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : code == NOT_SUPPORTED ? "Not Supported" : "Error"; }

static double seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec / 1e9;
}

static double begin_s;
int nvmlInitWithFlags(unsigned flags) {
  sleep((unsigned)number("FAKE_NVML_SLEEP", 0));
  begin_s = seconds();
  return (void)flags, number("FAKE_NVML_INIT", OK);
}
int nvmlShutdown(void) { return OK; }
int nvmlSystemGetDriverVersion(char *out, unsigned length) { return snprintf(out, length, "%s", variable("FAKE_NVML_DRIVER", "580.65.06")), OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { return *out = number("FAKE_NVML_CUDA", 13000), OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { return *out = number("FAKE_NVML_COUNT", 2), OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
  if (index >= (unsigned)number("FAKE_NVML_COUNT", 2) || index >= 16) return INVALID_ARGUMENT;
  if (number("FAKE_NVML_LOST", 0) >> index & 1) return IS_LOST;
  devices[index].index = index;
  return *out = &devices[index], OK;
}

/* Parts of a GPU (MIG) are devices from 16 on. */
enum { WHOLE = 16 };

int nvmlDeviceGetMigDeviceHandleByIndex(Device *d, unsigned index, Device **out) {
  if (index || !getenv("FAKE_NVML_MIG_GIB")) return NOT_FOUND;
  devices[WHOLE + d->index].index = WHOLE + d->index;
  return *out = &devices[WHOLE + d->index], OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
  unsigned index;
  if (sscanf(uuid, "GPU-%x", &index) == 1) return nvmlDeviceGetHandleByIndex_v2(index - 0xa0, out);
  if (sscanf(uuid, "MIG-%x", &index) != 1 || index >= (unsigned)number("FAKE_NVML_COUNT", 2)) return NOT_FOUND;
  return nvmlDeviceGetMigDeviceHandleByIndex(&(Device){index}, 0, out);
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *part, Device **out) {
  return nvmlDeviceGetHandleByIndex_v2(part->index - WHOLE, out);
}

int nvmlDeviceGetIndex(Device *d, unsigned *out) { return *out = d->index, OK; }

int nvmlDeviceGetUUID(Device *d, char *out, unsigned length) {
  return snprintf(out, length, "GPU-%08x-0000-4000-8000-000000000000", 0xa0 + d->index), OK;
}

int nvmlDeviceGetName(Device *d, char *out, unsigned length) {
  if (d->index >= WHOLE) {
    const char *size = variable("FAKE_NVML_MIG_GIB", ""), *whole = variable("FAKE_NVML_NAME", "Fake GPU");
    return snprintf(out, length, "%s MIG 1g.%sgb", whole, size), OK;
  }
  const char *name = entry(variable("FAKE_NVML_NAME", ""), d->index);
  if (*name) return snprintf(out, length, "%.*s", (int)strcspn(name, ","), name), OK;
  return snprintf(out, length, "Fake GPU %u", d->index), OK;
}

int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
  if (d->index >= WHOLE) {
    out->total = out->free = gib(variable("FAKE_NVML_MIG_GIB", ""), 0);
    return out->used = 0, OK;
  }
  out->total = gib(variable("FAKE_NVML_TOTAL_GIB", "32"), 0);
  out->free = gib(variable("FAKE_NVML_FREE_GIB", "31"), d->index);
  return out->used = out->total - out->free, supported();
}

int nvmlDeviceGetUtilizationRates(Device *d, Load *out) {
  out->gpu = getenv("FAKE_NVML_USE") ? (unsigned)listed("FAKE_NVML_USE", d->index, "0") : 10 + d->index;
  if (getenv("FAKE_NVML_USE_AT_FIRST") && seconds() < begin_s + 1) out->gpu = listed("FAKE_NVML_USE_AT_FIRST", d->index, "0");
  return out->memory = 5, supported();
}

int nvmlDeviceGetTemperature(Device *d, int sensor, unsigned *out) {
  *out = getenv("FAKE_NVML_TEMPERATURE") ? (unsigned)listed("FAKE_NVML_TEMPERATURE", d->index, "0") : 40 + d->index;
  return (void)sensor, supported();
}

int nvmlDeviceGetPowerUsage(Device *d, unsigned *milliwatt) {
  *milliwatt = getenv("FAKE_NVML_POWER") ? 1000u * listed("FAKE_NVML_POWER", d->index, "0") : 75500 + d->index;
  return supported();
}

/* Millijoules of FAKE_NVML_ENERGY watts since the machine was started. */
int nvmlDeviceGetTotalEnergyConsumption(Device *d, unsigned long long *millijoule) {
  if (!getenv("FAKE_NVML_ENERGY")) return NOT_SUPPORTED; /* cards before Volta */
  *millijoule = listed("FAKE_NVML_ENERGY", d->index, "0") * (unsigned long long)(seconds() * 1000);
  return supported();
}

int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *milliwatt) {
  if (!getenv("FAKE_NVML_POWER_LIMIT")) return NOT_SUPPORTED;
  return *milliwatt = 1000u * listed("FAKE_NVML_POWER_LIMIT", d->index, "0"), supported();
}

int nvmlDeviceGetPowerManagementDefaultLimit(Device *d, unsigned *milliwatt) {
  if (!getenv("FAKE_NVML_POWER_DEFAULT")) return NOT_SUPPORTED;
  return *milliwatt = 1000u * listed("FAKE_NVML_POWER_DEFAULT", d->index, "0"), supported();
}

int nvmlDeviceGetEccMode(Device *d, unsigned *current, unsigned *pending) {
  if (!getenv("FAKE_NVML_ECC_MODE")) return NOT_SUPPORTED; /* most workstation cards */
  return *current = *pending = listed("FAKE_NVML_ECC_MODE", d->index, "0"), supported();
}

int nvmlDeviceGetPciInfo_v3(Device *d, Pci *out) {
  memset(out, 0, sizeof *out);
  out->bus = 0x3a + d->index;
  if (!getenv("FAKE_NVML_BUS")) return snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus), supported();
  if (d->index) return NOT_SUPPORTED;
  return snprintf(out->bus_id, sizeof out->bus_id, "0000%s", getenv("FAKE_NVML_BUS")), supported();
}

/* One set of events, each once. */
enum { XID_CRITICAL_ERROR = 8 };
typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
static int registered[16];

int nvmlEventSetCreate(void **out) { return *out = registered, OK; }
int nvmlDeviceRegisterEvents(Device *d, unsigned long long types, void *set) {
  if (!number("FAKE_NVML_EVENTS", 1) || set != registered) return NOT_SUPPORTED;
  return registered[d->index] = types == XID_CRITICAL_ERROR, OK;
}

int nvmlEventSetWait_v2(void *set, Event *out, unsigned milliseconds) {
  static const char *rest;
  unsigned index, xid;
  if (set != registered) return INVALID_ARGUMENT;
  for (rest = rest ? rest : variable("FAKE_NVML_XID", ""); *rest;) {
    int known = sscanf(rest, "%u:%u", &index, &xid) == 2 && index < 16 && registered[index];
    int lost = !strncmp(rest, "lost", 4);
    rest += strcspn(rest, ",");
    rest += *rest == ',';
    if (lost) return IS_LOST;
    if (known) return *out = (Event){&devices[index], XID_CRITICAL_ERROR, xid, -1u, -1u}, OK;
  }
  return usleep(milliseconds * 1000), TIMEOUT;
}

int nvmlDeviceGetFanSpeed(Device *d, unsigned *percent) {
  if (!getenv("FAKE_NVML_FAN")) return NOT_SUPPORTED; /* cards without a fan of their own */
  return *percent = listed("FAKE_NVML_FAN", d->index, "0"), supported();
}

int nvmlDeviceGetCudaComputeCapability(Device *d, int *major, int *minor) {
  return (void)d, sscanf(variable("FAKE_NVML_CAPABILITY", "12.0"), "%d.%d", major, minor), supported();
}

/* The processes of a GPU in this variable, as many as fit into `out`; how many there are. */
static unsigned processes(const char *name, unsigned index, Process *out, unsigned room) {
  const char *at = variable(name, "");
  unsigned found = 0, pid, skipped = 0;
  double used;
  for (; index && (at = strchr(at, ';')); index--) at++;
  for (; at && sscanf(at, "%u:%lf", &pid, &used) == 2; found++) {
    if (found < room) out[found] = (Process){.pid = pid, .used = (unsigned long long)(used * (1ull << 30))};
    skipped = strcspn(at, ",;");
    at = at[skipped] == ',' ? at + skipped + 1 : NULL;
  }
  return found;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Device *d, unsigned *count, Process *out) {
  unsigned room = *count, gpu = d->index % WHOLE;
  if (supported()) return *count = 0, NOT_SUPPORTED;
  if (gpu == 0 && number("FAKE_NVML_PID", 0)) {
    *count = 1;
    if (room < 1) return INSUFFICIENT_SIZE;
    return *out = (Process){.pid = number("FAKE_NVML_PID", 0), .used = 1ull << 30}, OK;
  }
  *count = processes("FAKE_NVML_PROCESSES", gpu, out, room);
  return *count > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(Device *d, unsigned *count, Process *out) {
  unsigned room = *count;
  if (supported()) return *count = 0, NOT_SUPPORTED;
  *count = processes("FAKE_NVML_DISPLAYS", d->index % WHOLE, out, room);
  return *count > room ? INSUFFICIENT_SIZE : OK;
}

int nvmlDeviceGetComputeMode(Device *d, unsigned *out) { return *out = listed("FAKE_NVML_COMPUTE_MODE", d->index, "0"), supported(); }

int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) {
  if (!getenv("FAKE_NVML_MIG")) return NOT_SUPPORTED; /* most cards */
  return *current = *pending = listed("FAKE_NVML_MIG", d->index, "0"), supported();
}

int nvmlDeviceGetVirtualizationMode(Device *d, unsigned *out) { return *out = listed("FAKE_NVML_VIRTUAL", d->index, "0"), supported(); }

static int reasons(Device *d, unsigned long long *out) { return *out = listed("FAKE_NVML_REASONS", d->index, "1"), supported(); }
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *d, unsigned long long *out) { return reasons(d, out); }

int nvmlDeviceGetTotalEccErrors(Device *d, int type, int counter, unsigned long long *out) {
  if (type != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, volatile */
  return *out = listed("FAKE_NVML_ECC", d->index, "0"), supported();
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *d, unsigned *out) {
  return *out = listed("FAKE_NVML_RETIRED", d->index, "0"), supported();
}

int nvmlDeviceGetPersistenceMode(Device *d, unsigned *out) { return *out = listed("FAKE_NVML_PERSISTENCE", d->index, "1"), supported(); }
int nvmlDeviceGetCurrPcieLinkWidth(Device *d, unsigned *out) { return *out = listed("FAKE_NVML_WIDTH", d->index, "16"), supported(); }
int nvmlDeviceGetMaxPcieLinkWidth(Device *d, unsigned *out) { return *out = listed("FAKE_NVML_WIDTH_MOST", d->index, "16"), supported(); }

int nvmlDeviceGetCurrPcieLinkGeneration(Device *d, unsigned *out) {
  return *out = listed("FAKE_NVML_GENERATION", d->index, "1"), supported(); /* idle */
}

int nvmlDeviceGetMaxPcieLinkGeneration(Device *d, unsigned *out) {
  return *out = listed("FAKE_NVML_GENERATION_MOST", d->index, "4"), supported();
}

int nvmlDeviceGetNvLinkState(Device *d, unsigned link, unsigned *out) {
  int up = listed("FAKE_NVML_NVLINKS", d->index, "-1");
  if (up < 0) return NOT_SUPPORTED;
  if (link >= 4) return INVALID_ARGUMENT;
  return *out = (int)link < up, supported();
}

int nvmlDeviceGetTopologyCommonAncestor(Device *a, Device *b, unsigned *out) {
  return (void)a, (void)b, *out = number("FAKE_NVML_TOPOLOGY", 30), supported();
}

int nvmlDeviceGetP2PStatus(Device *a, Device *b, unsigned what, unsigned *out) {
  int bridged = !getenv("FAKE_NVML_BRIDGES") || a->index / 2 == b->index / 2;
  if (what == 2) *out = bridged && listed("FAKE_NVML_NVLINKS", a->index, "-1") > 0 && listed("FAKE_NVML_NVLINKS", b->index, "-1") > 0 ? 0 : 5;
  else *out = number("FAKE_NVML_P2P", 0);
  return supported();
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
  return nvmlDeviceGetComputeRunningProcesses_v2(d, count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *d, unsigned *count, Process *out) {
  return nvmlDeviceGetGraphicsRunningProcesses_v2(d, count, out);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *d, unsigned long long *out) { return reasons(d, out); }

int nvmlDeviceGetRemappedRows(Device *d, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
  if (!getenv("FAKE_NVML_REMAP")) return NOT_SUPPORTED; /* cards before Ampere */
  int state = listed("FAKE_NVML_REMAP", d->index, "0");
  *correctable = *uncorrectable = 0;
  return *pending = state == 1, *failed = state == 2, supported();
}
#endif
