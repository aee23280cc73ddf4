// Creation and end of communicators, and their pending calls.

#include "state.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fcntl.h>
#include <random>
#include <thread>
#include <unistd.h>

namespace nccl_standin {

std::string random_name() {
    std::random_device random;
    char text[64];
    std::snprintf(text, sizeof text, "/meshstep-nccl-%08x%08x%08x%08x", random(), random(), random(), random());
    return text;
}

static Result attach(const Handle &comm) {
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

static Result join(const Handle &comm, Comm **place) {
    Result result = attach(comm);
    if (result != Success) return result;
    std::lock_guard<std::mutex> guard(lock);
    comms[comm.get()] = comm;
    *place = comm.get();
    return Success;
}

// All ranks have chosen: creates the communicator of the ranks with this color, ordered by key and then by rank.
static Result divide(const Handle &comm) {
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
static Result form_window(const Handle &comm) {
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
static void drop_windows(Comm *comm) {
    for (auto it = windows.begin(); it != windows.end();) it = it->first->comm == comm ? windows.erase(it) : std::next(it);
}

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
static Result scale(const Handle &comm, Operation &op) {
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
static int async_ms(const Handle &comm) {
    std::lock_guard<std::mutex> guard(lock);
    return comm->blocking ? 0 : plan.async_ms;
}

// `told` is the answer to a call that goes on.
Result now_or_later(const Handle &comm, std::function<void()> work, Result told) {
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
    return told;
}

Result end(Comm *handle, void (*work)(const Handle &)) {
    Handle comm = find(handle);
    if (!comm) return fail(InvalidArgument, "no such communicator");
    if (comm->ended.exchange(true)) return fail(InvalidUsage, "the communicator is already ending");
    // NCCL 2.28 says success at once.
    auto finish = [=] {
        work(comm);
        std::lock_guard<std::mutex> guard(lock);
        drop_windows(comm.get());
        comms.erase(comm.get());
    };
    return now_or_later(comm, finish, Success);
}

} // namespace nccl_standin
