// Work on the caller's streams, through the driver's public functions.

#include "state.h"

namespace nccl_standin {

struct HostStep {
    Handle comm;
    std::function<void()> run;
    bool again;
};

bool open(const char *buffer, size_t bytes) {
    static auto open = driver<int (*)(uintptr_t, size_t)>("meshstep_standin_open");
    return open(reinterpret_cast<uintptr_t>(buffer), bytes) == 0;
}

static bool is_captured(void *stream) {
    static auto ask = driver<int (*)(void *, int *)>("cuStreamIsCapturing");
    int status = 0;
    return !ask(stream, &status) && status != 0;
}

// Counts the communicator as captured while the stream's capture or its graphs exist.
static void keep(const Handle &comm, void *stream) {
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

void on_stream(const Handle &comm, void *stream, std::function<void()> run) {
    static auto launch = driver<int (*)(void *, void (*)(void *), void *)>("cuLaunchHostFunc");
    auto step = [](void *data) {
        std::unique_ptr<HostStep> step(static_cast<HostStep *>(data));
        if (!step->comm->aborted) step->run();
        if (step->again) step.release();
    };
    bool again = is_captured(stream);
    if (again) keep(comm, stream);
    if (launch(stream, step, new HostStep{comm, std::move(run), again})) comm->error = CudaError;
}

void wait_for(const Handle &comm, void *stream, Word &word, uint64_t least) {
    static auto wait = driver<int (*)(void *, uintptr_t, uint64_t, unsigned)>("cuStreamWaitValue64_v2");
    if (wait(stream, reinterpret_cast<uintptr_t>(&word), least, 0)) comm->error = CudaError;
}

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

} // namespace nccl_standin
