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
//                             from now on finalize, destroy and abort of non-blocking communicators return at once,
//                             finalize with ncclInProgress and the others with ncclSuccess, and finish so much later on
//                             a thread of their own; "async 0" ends this
//   meshstep_standin_comms    returns the number of communicators
//   meshstep_standin_launches returns the number of calls that put operations on a stream; a group counts once
//   meshstep_standin_windows  returns the number of windows, and in the upper half the number of ncclMemAlloc allocations
//   -DMESHSTEP_OLD            a library without the newer functions: blocking, no splits, no asynchronous errors

#include "state.h"

using namespace nccl_standin;

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
    if (!comm || comm->ended) return fail(InvalidArgument, "no such communicator, or one that ends");
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
    now_or_later(comm, [] {}, InProgress);
    return InProgress;
}

#endif

} // extern "C"
