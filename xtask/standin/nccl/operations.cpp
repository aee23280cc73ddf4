// Collectives, sends and receives.

#include "state.h"

#include <algorithm>
#include <unistd.h>

namespace nccl_standin {

static void take(Comm *comm, uint64_t number, const Operation &op) {
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

static void collective(const Handle &comm, const Operation &op) {
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
static void trade(const Handle &comm, const std::vector<Operation> &ops) {
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
static void misbehave(const Handle &comm, const Operation &op) {
    std::lock_guard<std::mutex> guard(lock);
    bool mine = comm->planned && !plan.what.empty() && plan.rank == comm->rank && plan.operation == comm->operations;
    ++comm->operations;
    if (!mine) return;
    if (plan.what == "die") _exit(9);
    if (plan.what == "error") on_stream(comm, op.stream, [c = comm.get(), code = plan.code] { c->error = code; });
    wait_for(comm, op.stream, comm->never, 1);
    plan.what.clear();
}

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

} // namespace nccl_standin
