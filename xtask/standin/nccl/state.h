// State and functions that the parts of the stand-in for NCCL share; libnccl.cpp says how it works.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <utility>
#include <vector>

namespace nccl_standin {

using Word = std::atomic<uint64_t>;

// NCCL's enumeration values.
enum Result : int { Success, CudaError, SystemError, InternalError, InvalidArgument, InvalidUsage, RemoteError, InProgress };
enum Type : int { U64 = 5, F16, F32, F64, BF16 };
enum Reduction : int { Sum, Prod, Max, Min, Avg, PreMulSum /* and all numbers after it */ };
enum Kind : uint64_t { AllReduce, ReduceScatter, AllGather, Broadcast, Send, Recv };

constexpr size_t MaxRanks = 8;
constexpr size_t MaxFactors = 8; // at a time; factors must be destroyed after use
constexpr size_t MaxParcels = 16; // from one rank to another in one group
constexpr size_t SlotBytes = size_t{32} << 20; // address space; the system commits memory at first access
constexpr uint64_t Released = uint64_t{1} << 62; // beyond every count: ends all waits

struct UniqueId {
    char internal[128];
};

struct Config {
    size_t size;
    unsigned magic, version;
    int blocking;
};

// Parameters on which the ranks of an operation must agree.
struct Call {
    uint64_t kind, count, type, reduction, root;
    bool operator==(const Call &other) const { return !std::memcmp(this, &other, sizeof *this); }
};

// Header of a message between two ranks; `offset` is the position in the pair's slot.
struct Parcel {
    Call call;
    uint64_t offset;
};

struct Choice {
    int64_t color, key;
};

// Memory shared by the ranks of a communicator, initially all zeros. Operation n uses the half n % 2: no rank begins n + 2
// before all ranks have begun n + 1, and so have finished n.
struct Shared {
    Word world, attached, aborted, chosen;
    Word taken[MaxRanks];
    Word arrived[MaxRanks]; // for each rank, the number of ranks that have begun its current operation and the next
    Call calls[2][MaxRanks];
    Choice choices[2][MaxRanks];
    Word registering;
    uint64_t windows[2][MaxRanks]; // bytes and flags
    Word sent[MaxRanks][MaxRanks], received[MaxRanks][MaxRanks]; // from, to
    Parcel parcels[MaxRanks][MaxRanks][MaxParcels];
    alignas(4096) char slots[2 * MaxRanks + MaxRanks * MaxRanks][SlotBytes];

    char *slot(uint64_t number, size_t rank) { return slots[number % 2 * MaxRanks + rank]; }
    char *pair(size_t from, size_t to) { return slots[2 * MaxRanks + from * MaxRanks + to]; }
};

struct Operation {
    Kind kind;
    const char *from;
    char *to;
    size_t count;
    Type type;
    Reduction reduction;
    size_t root; // or the peer
    void *stream;
    double factor = 1;
};

// A reduction operator created for a factor.
struct Scaled {
    Type type;
    double factor;
};

struct Comm;

struct Split {
    uint64_t number;
    Comm **child;
};

struct Window {
    Comm *comm;
    uintptr_t start;
    size_t bytes;
};

struct Registration {
    uint64_t number;
    Window **place;
    Window window;
};

struct Comm {
    std::string name;
    Shared *shared = nullptr;
    size_t rank = 0, world = 0;
    bool blocking = true, planned = false;
    std::atomic<bool> aborted{false};
    std::atomic<int> error{Success};
    std::atomic<int> captured{0}; // references from captures and graphs
    uint64_t operations = 0, collectives = 0, splits = 0;
    uint64_t sends[MaxRanks] = {}, receives[MaxRanks] = {};
    Word opened{0}, never{0};
    std::unique_ptr<Split> split;
    std::unique_ptr<Registration> registration;
    uint64_t registrations = 0;
    std::vector<Operation> deferred;
    std::map<int, Scaled> scaled;
    std::atomic<int> ending{0}; // asynchronous finalize, destroy and abort calls in progress
    std::atomic<bool> ended{false};

    ~Comm() {
        if (shared) munmap(shared, sizeof(Shared));
    }
};

using Handle = std::shared_ptr<Comm>;

// Call with `lock` held, except for what is atomic or of one thread.
extern std::mutex &lock;
extern std::map<Comm *, Handle> &comms;
extern std::map<uintptr_t, size_t> &allocations;
extern std::map<Window *, std::unique_ptr<Window>> &windows;
extern std::atomic<size_t> launches;
extern thread_local int depth;
extern thread_local std::vector<std::pair<Handle, Operation>> grouped;
extern thread_local std::string last_error;

// Injected fault.
struct Plan {
    std::string what;
    uint64_t rank = 0, operation = 0;
    int code = 0;
    int abort_ms = 0;
    int async_ms = 0;
};

extern Plan &plan;

void set_plan(const char *text);
Result fail(Result result, const std::string &text);
void pause();

// Function of the driver, by its public name.
template <class F> F driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

// streams.cpp

// Within a step: makes a device buffer accessible. The driver keeps an error if the buffer is not allocated.
bool open(const char *buffer, size_t bytes);

// Waits until no capture and no graph holds the communicator.
void outlive_captures(const Handle &comm);

// Runs `run` when the stream reaches it, unless the communicator was aborted before. Holds the communicator until then, and
// for ever if captured, because the graph may be launched at any time.
void on_stream(const Handle &comm, void *stream, std::function<void()> run);

void wait_for(const Handle &comm, void *stream, Word &word, uint64_t least);

// Waits for a count of `count`, then runs `run`. Waits for ever if the ranks do not agree or a rank has aborted.
void meet(const Handle &comm, void *stream, Word &word, uint64_t count, std::function<bool()> agree,
          std::function<void()> run);

// arithmetic.cpp

// Reduces elements `first..first + op.count` of all ranks' slots.
void reduce(Comm *comm, uint64_t number, size_t first, const Operation &op);

void multiply(Type type, char *values, size_t count, double factor);

// Reads the first value of a type, without rounding.
bool read(Type type, const void *from, double *value);

size_t size_of(int type);

// operations.cpp

// Returns true if a receive overwrites the buffer of a send in the same group: NCCL does not order the two.
bool entangled(const std::vector<Operation> &ops);

void enqueue(const Handle &comm, const std::vector<Operation> &ops);

// communicators.cpp

std::string random_name();
Handle find(Comm *comm);

// Advances the pending calls of the communicator. Returns true if any are left.
bool busy(const Handle &comm);

Result settle(const Handle &comm);
Result start(Comm *handle, Operation op);
Result make(Comm **place, int world, UniqueId id, int rank, bool blocking);

// Releases all operations that wait for this rank. Returns when no capture or graph holds the communicator.
void abandon(const Handle &comm);

// Runs `work` at once, or after the delay that a test has set; the communicator is in progress until then.
Result now_or_later(const Handle &comm, std::function<void()> work, Result told);

// Ends a communicator; it no longer exists after `work`.
Result end(Comm *handle, void (*work)(const Handle &));

} // namespace nccl_standin
