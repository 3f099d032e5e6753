/* NCCL between real processes of one machine, through shared memory. Each operation is queued on its stream and waits
 * there for the other ranks, so that a missing rank looks as on a GPU: the host goes on until it waits for the stream. */
#include "null_gpu.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 8, EXCHANGED = 1 << 20 }; /* larger messages are synchronised; their contents are not exchanged */
enum { ALL_REDUCE, BROADCAST, ALL_GATHER, OTHER };
typedef struct {
  char name[128];
} UniqueId;
typedef struct {
  int arrived, generation;
  struct {
    int kind;
    size_t bytes;
  } called[RANKS];
  char data[RANKS][EXCHANGED];
} Room;
typedef struct {
  Room *room;
  int ranks, rank, device;
  volatile bool aborted;
} Comm;

static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* by ncclDataType_t */

int ncclGetVersion(int *version) { return *version = 22907, SUCCESS; }
const char *ncclGetErrorString(int code) { return code ? "unhandled cuda error (run with NCCL_DEBUG=INFO for details)" : "no error"; }
const char *ncclGetLastError(void *comm) { return (void)comm, ""; }
/* A file without a name, which this process offers to the other ranks: nothing is left behind, whoever is killed. */
static const char OFFERED[] = "/proc/%d/fd/%d";
int ncclGetUniqueId(UniqueId *id) {
  int file = memfd_create("null-nccl", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Room))) return 2; /* ncclSystemError */
  memset(id, 0, sizeof *id);
  return snprintf(id->name, sizeof id->name, OFFERED, getpid(), file), SUCCESS;
}

static bool ended(const Comm *comm) { return comm->aborted || device_state(comm->device)->fault; }

/* All ranks are here, or false: aborted, or the GPU is lost. */
static bool met(Comm *comm) {
  Room *room = comm->room;
  int generation = __atomic_load_n(&room->generation, __ATOMIC_SEQ_CST);
  if (__atomic_add_fetch(&room->arrived, 1, __ATOMIC_SEQ_CST) == comm->ranks) {
    __atomic_store_n(&room->arrived, 0, __ATOMIC_SEQ_CST);
    __atomic_add_fetch(&room->generation, 1, __ATOMIC_SEQ_CST);
    return true;
  }
  while (__atomic_load_n(&room->generation, __ATOMIC_SEQ_CST) == generation) {
    if (ended(comm)) return false;
    usleep(20);
  }
  return true;
}

int ncclCommInitRankConfig(Comm **out, int ranks, UniqueId id, int rank, void *config) {
  COUNT("NCCL communicator");
  (void)config;
  if (ranks > RANKS) return 4; /* ncclInvalidArgument */
  int file = open(id.name, O_RDWR | O_CLOEXEC);
  if (file < 0) return 2; /* ncclSystemError: as without the process that has made the id */
  Room *room = mmap(0, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  Comm *comm = calloc(1, sizeof *comm);
  if (room == MAP_FAILED || !comm) return 2;
  *comm = (Comm){.room = room, .ranks = ranks, .rank = rank, .device = physical_device()};
  *out = comm;
  if (!met(comm)) return 1;
  int owner, offered;
  if (sscanf(id.name, OFFERED, &owner, &offered) == 2 && owner == getpid()) close(offered); /* all have it */
  return SUCCESS;
}
int ncclCommInitRank(Comm **out, int ranks, UniqueId id, int rank) { return ncclCommInitRankConfig(out, ranks, id, rank, NULL); }
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = device_state(comm->device)->fault ? 1 : 0, SUCCESS; }
int ncclCommCount(const Comm *comm, int *count) { return *count = comm->ranks, SUCCESS; }
int ncclCommUserRank(const Comm *comm, int *rank) { return *rank = comm->rank, SUCCESS; }
int ncclCommAbort(Comm *comm) {
  COUNT("NCCL abort");
  if (comm) comm->aborted = true; /* as in NCCL, without one nothing happens */
  return SUCCESS;
}
int ncclCommSplit(void) { return 5; } /* ncclInvalidUsage: no communicator is made from another */

#define REDUCE(TYPE)                                                              \
  for (size_t i = 0; i < op->bytes / sizeof(TYPE); i++) {                         \
    TYPE value = ((TYPE *)room->data[0])[i];                                      \
    for (int r = 1; r < comm->ranks; r++) {                                       \
      TYPE other = ((TYPE *)room->data[r])[i];                                    \
      if (op->reduction == 1) value *= other;                                     \
      else if (op->reduction == 2) value = value > other ? value : other;         \
      else if (op->reduction == 3) value = value < other ? value : other;         \
      else value += other;                                                        \
    }                                                                             \
    ((TYPE *)op->to)[i] = op->reduction == 4 ? value / (TYPE)comm->ranks : value; \
  }

static void reduce(const Op *op, const Comm *comm, const Room *room) {
  switch (op->type) { /* there is no arithmetic of 16 bits here: such results stay as they were */
    case 0: case 1: REDUCE(int8_t) break;
    case 2: case 3: REDUCE(int32_t) break;
    case 4: case 5: REDUCE(int64_t) break;
    case 7: REDUCE(float) break;
    case 8: REDUCE(double) break;
  }
}

/* Ranks that call different operations wait for ever, as they usually do on GPUs. */
static bool same(Comm *comm) {
  for (int r = 1; r < comm->ranks; r++)
    if (comm->room->called[r].kind != comm->room->called[0].kind || comm->room->called[r].bytes != comm->room->called[0].bytes) {
      while (!ended(comm)) usleep(1000);
      return false;
    }
  return true;
}

/* GPUs whose peer-to-peer copies never arrive, unless NCCL is told to do without. */
static bool lost(const Op *op) {
  const char *without = getenv("NCCL_P2P_DISABLE");
  return op->bytes > EXCHANGED && getenv("NULL_GPU_P2P_HANGS") && !(without && *without == '1');
}

static void do_collective(const Op *op) {
  Comm *comm = op->owner;
  while (lost(op) && !ended(comm)) usleep(1000);
  Room *room = comm->room;
  bool exchanged = op->bytes <= EXCHANGED && op->kind != OTHER;
  if (ended(comm)) return;
  if (exchanged && (op->kind != BROADCAST || comm->rank == op->root)) memcpy(room->data[comm->rank], op->from, op->bytes);
  room->called[comm->rank].kind = op->kind;
  room->called[comm->rank].bytes = op->bytes;
  if (!met(comm) || !same(comm)) return;
  if (exchanged && op->kind == ALL_REDUCE) reduce(op, comm, room);
  if (exchanged && op->kind == BROADCAST) memcpy(op->to, room->data[op->root], op->bytes);
  for (int r = 0; exchanged && op->kind == ALL_GATHER && r < comm->ranks; r++)
    memcpy((char *)op->to + (size_t)r * op->bytes, room->data[r], op->bytes);
  met(comm); /* nobody writes into the room before all have read */
}

static int collective(int kind, const void *from, void *to, size_t count, int type, int detail, Comm *comm, Stream *stream) {
  size_t bytes = count * SIZES[type];
  if (bytes > EXCHANGED) COUNT("NCCL large");
  else COUNT("NCCL small");
  Op op = {.run = do_collective, .to = to, .from = from, .bytes = bytes, .kind = kind, .type = type, .reduction = detail, .root = detail, .owner = comm, .collective = true};
  return submit(stream, op, true), fault() ? 1 : SUCCESS;
}
int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, Comm *comm, Stream *stream) {
  return collective(ALL_REDUCE, from, to, count, type, reduction, comm, stream);
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, Stream *stream) {
  return collective(BROADCAST, from, to, count, type, root, comm, stream);
}
int ncclBcast(void *both, size_t count, int type, int root, Comm *comm, Stream *stream) {
  return ncclBroadcast(both, both, count, type, root, comm, stream);
}
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, Stream *stream) {
  return collective(ALL_GATHER, from, to, count, type, 0, comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, Comm *comm, Stream *stream) {
  return collective(OTHER, from, to, count, type, reduction, comm, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int reduction, int root, Comm *comm, Stream *stream) {
  return (void)root, collective(OTHER, from, to, count, type, reduction, comm, stream);
}
