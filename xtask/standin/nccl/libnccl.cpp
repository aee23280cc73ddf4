// Stand-in for NVIDIA's libnccl.so.2: the part of NCCL that Meshstep calls, on the CPU, for tests only.
//
// Ranks are threads of one process or processes of one machine. They communicate through shared memory that the unique id
// names. A collective runs on the caller's stream, through the driver's public functions only: a host function copies the
// rank's part into its slot, the stream waits for the parts of the other ranks, and a host function reads the result. So
// with the stand-in for the driver, a missing wait has a visible effect. As in NCCL, ranks with mismatched calls wait for
// ever; a non-blocking communicator makes progress only when its state is queried; abort releases operations that wait for
// this rank only, and does not return while a capture or a graph has operations of the communicator. Averages multiply by
// 1/n before they sum, as in NCCL; so do factors, and each product is rounded; sums go in the order of the ranks, f32
// through f64.
//
// Windows have no effect on collectives. Registration fails where NCCL would fail or hang: for memory not from
// ncclMemAlloc, for sizes that differ between ranks, and for memory that is freed before its window is deregistered.
//
// Captured operations run at every launch of the graph. So an operation takes its number when its stream reaches it, not at
// the call. It waits for a count that is the same at every launch, and then subtracts this count.
//
//   MESHSTEP_STANDIN_NCCL     a fault for this process, injected once, on communicators that init created:
//                             "hang RANK OP", "error RANK OP CODE", "die RANK OP"; operations count from 0
//   meshstep_standin_nccl     the same from a test, which may also pass "abort MS": the next abort takes so long; "async MS":
//                             from now on finalize, destroy and abort of non-blocking communicators return
//                             ncclInProgress at once and finish so much later; "async 0" ends this
//   meshstep_standin_comms    returns the number of communicators
//   meshstep_standin_launches returns the number of calls that put operations on a stream; a group counts once
//   meshstep_standin_windows  returns the number of windows, and in the upper half the number of ncclMemAlloc allocations
//   -DMESHSTEP_OLD            a library without the newer functions: blocking, no splits, no asynchronous errors

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace {

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

// Never destroyed, because threads may call until the process has ended.
std::mutex &lock = *new std::mutex;
auto &comms = *new std::map<Comm *, Handle>;
auto &allocations = *new std::map<uintptr_t, size_t>;
auto &windows = *new std::map<Window *, std::unique_ptr<Window>>;
thread_local int depth = 0;
std::atomic<size_t> launches{0};
thread_local std::vector<std::pair<Handle, Operation>> grouped;
thread_local std::string last_error = "nothing went wrong";

// Injected fault.
struct Plan {
    std::string what;
    uint64_t rank = 0, operation = 0;
    int code = 0;
    int abort_ms = 0;
    int async_ms = 0;
};

auto &plan = *new Plan;

void set_plan(const char *text) {
    char what[16] = "";
    unsigned long long a = 0, b = 0;
    int code = 0;
    std::sscanf(text, "%15s %llu %llu %d", what, &a, &b, &code);
    if (std::string(what) == "abort")
        plan.abort_ms = static_cast<int>(a);
    else if (std::string(what) == "async")
        plan.async_ms = static_cast<int>(a);
    else
        plan = {what, a, b, code, plan.abort_ms, plan.async_ms};
}

const bool planned_at_start = [] {
    if (const char *text = std::getenv("MESHSTEP_STANDIN_NCCL")) set_plan(text);
    return true;
}();

Result fail(Result result, const std::string &text) {
    last_error = text;
    return result;
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

// Functions of the driver, by their public names.

template <class F> F driver(const char *name) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW);
    return library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
}

struct Step {
    Handle comm;
    std::function<void()> run;
    bool again;
};

// Within a step: makes a device buffer accessible. The driver keeps an error if the buffer is not allocated.
bool open(const char *buffer, size_t bytes) {
    static auto open = driver<int (*)(uintptr_t, size_t)>("meshstep_standin_open");
    return open(reinterpret_cast<uintptr_t>(buffer), bytes) == 0;
}

bool is_captured(void *stream) {
    static auto ask = driver<int (*)(void *, int *)>("cuStreamIsCapturing");
    int status = 0;
    return !ask(stream, &status) && status != 0;
}

// Counts the communicator as captured while the stream's capture or its graphs exist.
void keep(const Handle &comm, void *stream) {
    static auto keep = driver<void (*)(void *, void (*)(void *), void *)>("meshstep_standin_keep");
    auto gone = [](void *data) {
        Handle comm = std::move(*std::unique_ptr<Handle>(static_cast<Handle *>(data)));
        --comm->captured;
    };
    ++comm->captured;
    keep(stream, gone, new Handle(comm));
}

void outlive_captures(const Handle &comm) {
    while (comm->captured > 0) pause();
}

// Runs `run` when the stream reaches it, unless the communicator was aborted before. Holds the communicator until then, and
// for ever if captured, because the graph may be launched at any time.
void on_stream(const Handle &comm, void *stream, std::function<void()> run) {
    static auto launch = driver<int (*)(void *, void (*)(void *), void *)>("cuLaunchHostFunc");
    auto step = [](void *data) {
        std::unique_ptr<Step> step(static_cast<Step *>(data));
        if (!step->comm->aborted) step->run();
        if (step->again) step.release();
    };
    bool again = is_captured(stream);
    if (again) keep(comm, stream);
    if (launch(stream, step, new Step{comm, std::move(run), again})) comm->error = CudaError;
}

void wait_for(const Handle &comm, void *stream, Word &word, uint64_t least) {
    static auto wait = driver<int (*)(void *, uintptr_t, uint64_t, unsigned)>("cuStreamWaitValue64_v2");
    if (wait(stream, reinterpret_cast<uintptr_t>(&word), least, 0)) comm->error = CudaError;
}

// Waits for a count of `count`, then runs `run`. Waits for ever if the ranks do not agree or a rank has aborted.
void meet(const Handle &comm, void *stream, Word &word, uint64_t count, std::function<bool()> agree,
          std::function<void()> run) {
    Comm *c = comm.get();
    wait_for(comm, stream, word, count);
    on_stream(comm, stream, [=, &word] {
        if (c->shared->aborted || !agree()) return;
        word -= count;
        ++c->opened;
    });
    wait_for(comm, stream, c->opened, 1);
    on_stream(comm, stream, [=] {
        --c->opened;
        run();
    });
}

// Arithmetic.

struct Bf16 {
    uint16_t bits;
    Bf16() = default;
    Bf16(float x) {
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        bool nan = (wide & 0x7fffffff) > 0x7f800000;
        bits = static_cast<uint16_t>(nan ? wide >> 16 | 0x40 : (wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    operator float() const {
        uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
};

// Reduces elements `first..first + count` of all ranks' slots.
template <class T, class Wide>
void reduce(Comm *comm, uint64_t number, size_t first, size_t count, Reduction reduction, char *to) {
    auto value = [&](size_t rank, size_t i) {
        T element;
        std::memcpy(&element, comm->shared->slot(number, rank) + (first + i) * sizeof(T), sizeof(T));
        Wide wide = static_cast<Wide>(element);
        return reduction == Avg ? static_cast<Wide>(wide * (Wide(1) / static_cast<Wide>(comm->world))) : wide;
    };
    for (size_t i = 0; i < count; ++i) {
        Wide result = value(0, i);
        for (size_t rank = 1; rank < comm->world; ++rank) {
            Wide x = value(rank, i);
            result = reduction == Max ? std::max(result, x) : reduction == Min ? std::min(result, x) : result + x;
        }
        T rounded = static_cast<T>(result);
        std::memcpy(to + i * sizeof(T), &rounded, sizeof(T));
    }
}

void reduce(Comm *comm, uint64_t number, size_t first, const Operation &op) {
    switch (op.type) {
    case U64: return reduce<uint64_t, uint64_t>(comm, number, first, op.count, op.reduction, op.to);
    case F16: return reduce<_Float16, float>(comm, number, first, op.count, op.reduction, op.to);
    case F32: return reduce<float, double>(comm, number, first, op.count, op.reduction, op.to);
    case F64: return reduce<double, double>(comm, number, first, op.count, op.reduction, op.to);
    case BF16: return reduce<Bf16, float>(comm, number, first, op.count, op.reduction, op.to);
    }
}

template <class T, class Wide> void multiply(char *values, size_t count, double factor) {
    for (size_t i = 0; i < count; ++i) {
        T element;
        std::memcpy(&element, values + i * sizeof(T), sizeof(T));
        element = static_cast<T>(static_cast<Wide>(element) * static_cast<Wide>(factor));
        std::memcpy(values + i * sizeof(T), &element, sizeof(T));
    }
}

void multiply(Type type, char *values, size_t count, double factor) {
    switch (type) {
    case F16: return multiply<_Float16, float>(values, count, factor);
    case F32: return multiply<float, double>(values, count, factor);
    case F64: return multiply<double, double>(values, count, factor);
    case BF16: return multiply<Bf16, float>(values, count, factor);
    default: return;
    }
}

// Reads the first value of a type, without rounding.
[[maybe_unused]] bool read(Type type, const void *from, double *value) {
    _Float16 half;
    Bf16 bf16;
    float single;
    switch (type) {
    case F16: return std::memcpy(&half, from, 2), *value = double(half), true;
    case BF16: return std::memcpy(&bf16, from, 2), *value = float(bf16), true;
    case F32: return std::memcpy(&single, from, 4), *value = single, true;
    case F64: return std::memcpy(value, from, 8), true;
    default: return false;
    }
}

size_t size_of(int type) {
    switch (type) {
    case F16: case BF16: return 2;
    case F32: return 4;
    case U64: case F64: return 8;
    default: return 0;
    }
}

// Operations.

void take(Comm *comm, uint64_t number, const Operation &op) {
    size_t bytes = op.count * size_of(op.type);
    if (!open(op.to, bytes * (op.kind == AllGather ? comm->world : 1))) return;
    switch (op.kind) {
    case AllReduce: return reduce(comm, number, 0, op);
    case ReduceScatter: return reduce(comm, number, comm->rank * op.count, op);
    case AllGather:
        for (size_t rank = 0; rank < comm->world; ++rank)
            std::memcpy(op.to + rank * bytes, comm->shared->slot(number, rank), bytes);
        return;
    default: std::memcpy(op.to, comm->shared->slot(number, op.root), bytes);
    }
}

void collective(const Handle &comm, const Operation &op) {
    Comm *c = comm.get();
    size_t bytes = op.count * size_of(op.type) * (op.kind == ReduceScatter ? c->world : 1);
    Call call{op.kind, op.count, uint64_t(op.type), uint64_t(op.reduction), op.root};
    on_stream(comm, op.stream, [=] {
        uint64_t number = c->collectives;
        c->shared->calls[number % 2][c->rank] = call;
        bool gives = op.kind != Broadcast || op.root == c->rank;
        if (gives && !open(op.from, bytes)) return;
        if (gives) std::memcpy(c->shared->slot(number, c->rank), op.from, bytes);
        if (op.reduction == PreMulSum)
            multiply(op.type, c->shared->slot(number, c->rank), bytes / size_of(op.type), op.factor);
        for (size_t rank = 0; rank < c->world; ++rank) ++c->shared->arrived[rank];
    });
    auto agree = [=] {
        Call *calls = c->shared->calls[c->collectives % 2];
        return std::all_of(calls, calls + c->world, [=](const Call &other) { return other == call; });
    };
    meet(comm, op.stream, c->shared->arrived[c->rank], c->world, agree, [=] { take(c, c->collectives++, op); });
}

// All sends are enqueued before any wait, so that a group with both ends of an exchange completes.
void trade(const Handle &comm, const std::vector<Operation> &ops) {
    Comm *c = comm.get();
    Shared *shared = c->shared;
    std::vector<std::function<void()>> ends;
    uint64_t offsets[MaxRanks] = {};
    for (const Operation &op : ops) {
        if (op.kind != Send) continue;
        size_t to = op.root, from = c->rank, bytes = op.count * size_of(op.type);
        uint64_t offset = offsets[to];
        offsets[to] += bytes;
        on_stream(comm, op.stream, [=] {
            if (!open(op.from, bytes)) return;
            Call call{Send, op.count, uint64_t(op.type), 0, 0};
            shared->parcels[from][to][c->sends[to]++ % MaxParcels] = {call, offset};
            std::memcpy(shared->pair(from, to) + offset, op.from, bytes);
            ++shared->sent[from][to];
        });
        ends.push_back([=] {
            meet(comm, op.stream, shared->received[from][to], 1, [] { return true; }, [] {});
        });
    }
    for (const Operation &op : ops) {
        if (op.kind != Recv) continue;
        size_t from = op.root, to = c->rank, bytes = op.count * size_of(op.type);
        Call call{Send, op.count, uint64_t(op.type), 0, 0};
        auto parcel = [=]() -> const Parcel & { return shared->parcels[from][to][c->receives[from] % MaxParcels]; };
        meet(comm, op.stream, shared->sent[from][to], 1, [=] { return parcel().call == call; }, [=] {
            if (open(op.to, bytes)) std::memcpy(op.to, shared->pair(from, to) + parcel().offset, bytes);
            ++c->receives[from];
            ++shared->received[from][to];
        });
    }
    for (auto &end : ends) end();
}

// Injects the planned fault if this is the planned operation.
void misbehave(const Handle &comm, const Operation &op) {
    std::lock_guard<std::mutex> guard(lock);
    bool mine = comm->planned && !plan.what.empty() && plan.rank == comm->rank && plan.operation == comm->operations;
    ++comm->operations;
    if (!mine) return;
    if (plan.what == "die") _exit(9);
    if (plan.what == "error") on_stream(comm, op.stream, [c = comm.get(), code = plan.code] { c->error = code; });
    wait_for(comm, op.stream, comm->never, 1);
    plan.what.clear();
}

// Returns true if a receive overwrites the buffer of a send in the same group: NCCL does not order the two.
bool entangled(const std::vector<Operation> &ops) {
    for (const Operation &send : ops)
        for (const Operation &recv : ops) {
            if (send.kind != Send || recv.kind != Recv || send.count == 0 || recv.count == 0) continue;
            const char *send_end = send.from + send.count * size_of(send.type);
            if (send.from < recv.to + recv.count * size_of(recv.type) && recv.to < send_end) return true;
        }
    return false;
}

void enqueue(const Handle &comm, const std::vector<Operation> &ops) {
    for (const Operation &op : ops) misbehave(comm, op);
    for (const Operation &op : ops)
        if (op.kind != Send && op.kind != Recv) collective(comm, op);
    trade(comm, ops);
}

// Creation and end of communicators.

std::string random_name() {
    std::random_device random;
    char text[64];
    std::snprintf(text, sizeof text, "/meshstep-nccl-%08x%08x%08x%08x", random(), random(), random(), random());
    return text;
}

Result attach(const Handle &comm) {
    int file = shm_open(comm->name.c_str(), O_RDWR | O_CREAT, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) return fail(SystemError, "cannot create shared memory " + comm->name);
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    if (memory == MAP_FAILED) return fail(SystemError, "shared memory cannot be mapped");
    comm->shared = static_cast<Shared *>(memory);
    uint64_t world = 0;
    bool first = comm->shared->world.compare_exchange_strong(world, comm->world);
    if (!first && world != comm->world) return fail(InvalidArgument, "ranks differ in the number of ranks");
    if (comm->shared->taken[comm->rank].exchange(1)) return fail(InvalidUsage, "two ranks have the same number");
    if (++comm->shared->attached == comm->world) shm_unlink(comm->name.c_str());
    return Success;
}

Handle find(Comm *comm) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = comms.find(comm);
    return found == comms.end() ? nullptr : found->second;
}

Result join(const Handle &comm, Comm **place) {
    Result result = attach(comm);
    if (result != Success) return result;
    std::lock_guard<std::mutex> guard(lock);
    comms[comm.get()] = comm;
    *place = comm.get();
    return Success;
}

// All ranks have chosen: creates the communicator of the ranks with this color, ordered by key and then by rank.
Result divide(const Handle &comm) {
    auto [number, place] = *comm->split;
    comm->split.reset();
    Choice *choices = comm->shared->choices[number % 2], mine = choices[comm->rank];
    *place = nullptr;
    if (mine.color < 0) return Success;
    std::vector<std::pair<int64_t, size_t>> members;
    for (size_t rank = 0; rank < comm->world; ++rank)
        if (choices[rank].color == mine.color) members.push_back({choices[rank].key, rank});
    std::sort(members.begin(), members.end());
    auto child = std::make_shared<Comm>();
    size_t hash = std::hash<std::string>()(comm->name + "." + std::to_string(number) + "." + std::to_string(mine.color));
    child->name = comm->name.substr(0, 31) + "-" + std::to_string(hash);
    child->world = members.size();
    child->rank = std::find(members.begin(), members.end(), std::make_pair(mine.key, comm->rank)) - members.begin();
    child->blocking = comm->blocking;
    return join(child, place);
}

// All ranks have registered: creates a window if their sizes and flags agree.
Result form_window(const Handle &comm) {
    auto [number, place, window] = *comm->registration;
    comm->registration.reset();
    uint64_t *brought = comm->shared->windows[number % 2];
    if (std::any_of(brought, brought + comm->world, [&](uint64_t other) { return other != brought[comm->rank]; }))
        return fail(InvalidUsage, "ranks register windows of different sizes or flags");
    std::lock_guard<std::mutex> guard(lock);
    auto made = std::make_unique<Window>(window);
    *place = made.get();
    windows[made.get()] = std::move(made);
    return Success;
}

// Removes the windows of a communicator that ends. The lock must be held.
void drop_windows(Comm *comm) {
    for (auto it = windows.begin(); it != windows.end();) it = it->first->comm == comm ? windows.erase(it) : std::next(it);
}

// Advances the pending calls of the communicator. Returns true if any are left.
bool busy(const Handle &comm) {
    if (comm->shared->attached < comm->world) return true;
    if (!comm->deferred.empty()) enqueue(comm, std::exchange(comm->deferred, {}));
    if (comm->registration) {
        if (comm->shared->registering < (comm->registration->number + 1) * comm->world) return true;
        if (Result result = form_window(comm); result != Success) comm->error = result;
    }
    if (!comm->split) return false;
    if (comm->shared->chosen < (comm->split->number + 1) * comm->world) return true;
    if (Result result = divide(comm); result != Success) comm->error = result;
    return false;
}

Result settle(const Handle &comm) {
    if (!comm->blocking) return InProgress;
    while (!comm->aborted && comm->error == Success && busy(comm)) pause();
    return static_cast<Result>(comm->error.load());
}

// Sets the factor of an operation that uses a reduction operator with a factor.
Result scale(const Handle &comm, Operation &op) {
    if (op.reduction < PreMulSum) return Success;
    auto found = comm->scaled.find(op.reduction);
    if (found == comm->scaled.end() || found->second.type != op.type)
        return fail(InvalidArgument, "a reduction that does not exist or has another type");
    op.reduction = PreMulSum;
    op.factor = found->second.factor;
    return Success;
}

Result start(Comm *handle, Operation op) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    if (Result result = scale(comm, op); result != Success) return result;
    size_t size = size_of(op.type), most = op.count * size * (op.kind == ReduceScatter ? comm->world : 1);
    if (size == 0 || op.root >= comm->world) return fail(InvalidArgument, "a type or a rank that does not exist");
    if (op.count > 0 && (!op.from || !op.to)) return fail(InvalidArgument, "a null buffer");
    if (most > SlotBytes) return fail(InternalError, "a buffer larger than the stand-in supports");
    if (depth > 0) {
        grouped.push_back({comm, op});
        return Success;
    }
    ++launches;
    if (comm->blocking) enqueue(comm, {op});
    else comm->deferred.push_back(op);
    return settle(comm);
}

Result make(Comm **place, int world, UniqueId id, int rank, bool blocking) {
    if (world < 1 || size_t(world) > MaxRanks || rank < 0 || rank >= world)
        return fail(InvalidArgument, "an invalid rank or number of ranks");
    auto comm = std::make_shared<Comm>();
    comm->name.assign(id.internal, strnlen(id.internal, sizeof id.internal));
    comm->rank = size_t(rank);
    comm->world = size_t(world);
    comm->blocking = blocking;
    comm->planned = true;
    Result result = join(comm, place);
    return result == Success ? settle(comm) : result;
}

// Releases all operations that wait for this rank. Returns when no capture or graph holds the communicator.
void abandon(const Handle &comm) {
    int slow = 0;
    {
        std::lock_guard<std::mutex> guard(lock);
        std::swap(slow, plan.abort_ms);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(slow));
    Shared *shared = comm->shared;
    comm->aborted = true;
    shared->aborted = 1;
    for (Word &word : shared->arrived) word = Released;
    for (auto *words : {shared->sent, shared->received})
        for (size_t i = 0; i < MaxRanks * MaxRanks; ++i) words[i / MaxRanks][i % MaxRanks] = Released;
    comm->opened = Released;
    comm->never = Released;
    shm_unlink(comm->name.c_str());
    outlive_captures(comm);
}

// Returns the delay of an asynchronous end of this communicator, or 0 for a synchronous end.
int async_ms(const Handle &comm) {
    std::lock_guard<std::mutex> guard(lock);
    return comm->blocking ? 0 : plan.async_ms;
}

// Runs `work` at once, or after the delay that a test has set; the communicator is in progress until then.
template <class Work> Result now_or_later(const Handle &comm, Work work) {
    int later = async_ms(comm);
    if (later == 0) {
        work();
        return Success;
    }
    ++comm->ending;
    std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(later));
        work();
        --comm->ending;
    }).detach();
    return InProgress;
}

// Ends a communicator; it no longer exists after `work`.
Result end(Comm *handle, void (*work)(const Handle &)) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    if (comm->ended.exchange(true)) return fail(InvalidUsage, "the communicator is already ending");
    return now_or_later(comm, [=] {
        work(comm);
        std::lock_guard<std::mutex> guard(lock);
        drop_windows(comm.get());
        comms.erase(comm.get());
    });
}

} // namespace

extern "C" {

int meshstep_standin = 1;

size_t meshstep_standin_comms() {
    std::lock_guard<std::mutex> guard(lock);
    return comms.size();
}

size_t meshstep_standin_launches() { return launches; }

uint64_t meshstep_standin_windows() {
    std::lock_guard<std::mutex> guard(lock);
    return uint64_t(allocations.size()) << 32 | windows.size();
}

void meshstep_standin_nccl(const char *text) {
    std::lock_guard<std::mutex> guard(lock);
    set_plan(text);
}

int ncclGetVersion(int *version) {
#ifdef MESHSTEP_OLD
    *version = 21003;
#else
    *version = 22803;
#endif
    return Success;
}

const char *ncclGetErrorString(int result) {
    static const char *names[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited", "in progress"};
    return result >= 0 && result < 8 ? names[result] : "unknown result code";
}

int ncclGetUniqueId(UniqueId *id) {
    std::memset(id, 0, sizeof *id);
    std::strcpy(id->internal, random_name().c_str());
    return Success;
}

int ncclCommInitRank(Comm **comm, int world, UniqueId id, int rank) { return make(comm, world, id, rank, true); }

int ncclCommDestroy(Comm *comm) {
    return end(comm, [](const Handle &) {});
}

int ncclCommAbort(Comm *comm) { return end(comm, abandon); }

int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, Comm *comm, void *stream) {
    return start(comm, {AllReduce, (const char *)from, (char *)to, count, Type(type), Reduction(reduction), 0, stream});
}

int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, Comm *comm, void *stream) {
    return start(comm, {ReduceScatter, (const char *)from, (char *)to, count, Type(type), Reduction(reduction), 0, stream});
}

int ncclAllGather(const void *from, void *to, size_t count, int type, Comm *comm, void *stream) {
    return start(comm, {AllGather, (const char *)from, (char *)to, count, Type(type), Sum, 0, stream});
}

int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm *comm, void *stream) {
    return start(comm, {Broadcast, (const char *)from, (char *)to, count, Type(type), Sum, size_t(root), stream});
}

int ncclSend(const void *from, size_t count, int type, int peer, Comm *comm, void *stream) {
    return start(comm, {Send, (const char *)from, (char *)from, count, Type(type), Sum, size_t(peer), stream});
}

int ncclRecv(void *to, size_t count, int type, int peer, Comm *comm, void *stream) {
    return start(comm, {Recv, (const char *)to, (char *)to, count, Type(type), Sum, size_t(peer), stream});
}

int ncclGroupStart() {
    ++depth;
    return Success;
}

int ncclGroupEnd() {
    if (depth == 0) return fail(InvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth > 0) return Success;
    std::map<Handle, std::vector<Operation>> by_comm;
    for (auto &[comm, op] : std::exchange(grouped, {})) by_comm[comm].push_back(op);
    Result result = Success;
    for (auto &[comm, ops] : by_comm) {
        if (entangled(ops)) return fail(InvalidUsage, "a group receives into a buffer that it sends");
        ++launches;
        if (comm->blocking) enqueue(comm, ops);
        else comm->deferred.insert(comm->deferred.end(), ops.begin(), ops.end());
        if (Result one = settle(comm); one != Success) result = one;
    }
    return result;
}

#ifndef MESHSTEP_OLD

const char *ncclGetLastError(Comm *) { return last_error.c_str(); }

int ncclCommInitRankConfig(Comm **comm, int world, UniqueId id, int rank, Config *config) {
    if (config->magic != 0xcafebeef) return fail(InvalidArgument, "a configuration without its magic number");
    return make(comm, world, id, rank, config->blocking != 0);
}

int ncclCommGetAsyncError(Comm *handle, int *error) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    bool left = comm->ending > 0 || busy(comm);
    *error = comm->error != Success ? comm->error.load() : left ? InProgress : Success;
    return Success;
}

int ncclCommSplit(Comm *handle, int color, int key, Comm **child, Config *) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    uint64_t number = comm->splits++;
    comm->shared->choices[number % 2][comm->rank] = {color, key};
    ++comm->shared->chosen;
    comm->split.reset(new Split{number, child});
    return settle(comm);
}

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, Comm *handle) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    bool ready = comm->shared->attached == comm->world && comm->deferred.empty() && !comm->split;
    if (!ready) return fail(InvalidArgument, "the communicator is used before its last call has finished");
    Scaled scaled{Type(type), 0};
    if (residence != 1 || !read(scaled.type, scalar, &scaled.factor))
        return fail(InvalidArgument, "a factor of a kind that the stand-in does not support");
    if (comm->scaled.size() == MaxFactors) return fail(InternalError, "too many reductions that were not destroyed");
    int number = PreMulSum;
    while (comm->scaled.count(number)) ++number;
    comm->scaled[number] = scaled;
    *op = number;
    return Success;
}

int ncclRedOpDestroy(int op, Comm *handle) {
    Handle comm = find(handle);
    return comm && comm->scaled.erase(op) ? Success : fail(InvalidArgument, "no such reduction");
}

int ncclMemAlloc(void **start, size_t bytes) {
    static auto alloc = driver<int (*)(uintptr_t *, size_t)>("cuMemAlloc_v2");
    uintptr_t made = 0;
    if (alloc(&made, bytes)) return fail(CudaError, "out of memory");
    std::lock_guard<std::mutex> guard(lock);
    allocations[made] = bytes;
    *start = reinterpret_cast<void *>(made);
    return Success;
}

int ncclMemFree(void *start) {
    static auto free = driver<int (*)(uintptr_t)>("cuMemFree_v2");
    auto address = reinterpret_cast<uintptr_t>(start);
    {
        std::lock_guard<std::mutex> guard(lock);
        auto found = allocations.find(address);
        if (found == allocations.end()) return fail(InvalidArgument, "memory that is not from ncclMemAlloc");
        for (auto &[window, _] : windows)
            if (window->start < address + found->second && address < window->start + window->bytes)
                return fail(InvalidUsage, "memory that is freed before its window is deregistered");
        allocations.erase(found);
    }
    return free(address) ? fail(CudaError, "memory cannot be freed") : Success;
}

int ncclCommWindowRegister(Comm *handle, void *start, size_t bytes, Window **place, int flags) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    auto address = reinterpret_cast<uintptr_t>(start);
    {
        std::lock_guard<std::mutex> guard(lock);
        auto after = allocations.upper_bound(address);
        bool inside = after != allocations.begin() && address + bytes <= std::prev(after)->first + std::prev(after)->second;
        if (!inside || bytes == 0) return fail(InvalidArgument, "a window of memory that is not from ncclMemAlloc");
    }
    if (comm->registration || comm->split) return fail(InvalidUsage, "the communicator is used before its last call has finished");
    uint64_t number = comm->registrations++;
    comm->shared->windows[number % 2][comm->rank] = bytes << 8 | uint64_t(flags);
    comm->registration.reset(new Registration{number, place, {handle, address, bytes}});
    ++comm->shared->registering;
    return settle(comm);
}

int ncclCommWindowDeregister(Comm *handle, Window *window) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = windows.find(window);
    if (found == windows.end() || window->comm != handle) return fail(InvalidArgument, "no such window of the communicator");
    windows.erase(found);
    return Success;
}

int ncclCommFinalize(Comm *handle) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    now_or_later(comm, [] {});
    return InProgress;
}

#endif

} // extern "C"
