// Captures and graphs of the stand-in for the driver.
//
// Work on a capturing stream, and on streams that joined the capture by an event, is recorded with its predecessors instead
// of executed. A launch is an operation of its stream; nodes with finished predecessors may run in any order.

#include "driver.h"

using namespace standin;

namespace {

struct Graph {
    std::vector<Node> nodes;
    std::vector<std::shared_ptr<void>> kept;
};

auto &graphs = *new std::map<Graph *, std::unique_ptr<Graph>>;
auto &executables = *new std::map<Executable *, std::shared_ptr<Executable>>;

// Returns true if all captured nodes precede the end of the origin stream.
bool joined(const Capture &capture) {
    std::vector<bool> before(capture.nodes.size());
    std::vector<size_t> open = capture.origin->after;
    while (!open.empty()) {
        size_t node = open.back();
        open.pop_back();
        if (before[node]) continue;
        before[node] = true;
        open.insert(open.end(), capture.nodes[node].after.begin(), capture.nodes[node].after.end());
    }
    for (bool is : before)
        if (!is) return false;
    return true;
}

} // namespace

extern "C" {

// For tests: returns the number of executable graphs.
size_t meshstep_standin_graphs() {
    Guard guard(lock);
    return executables.size();
}

// Replaces CUDA's user objects for the stand-in for NCCL: calls `gone` once the stream's capture and all its graphs are
// destroyed.
void meshstep_standin_keep(void *handle, void (*gone)(void *), void *data) {
    Guard guard(lock);
    std::shared_ptr<void> kept(data, gone);
    auto stream = find(handle);
    if (stream && stream->capture) stream->capture->kept.push_back(kept);
}

int cuStreamBeginCapture_v2(void *handle, int) {
    BEGIN(begin_in_context(__func__));
    if (!handle) return CaptureImplicit;
    auto stream = find(handle);
    if (!stream) return InvalidHandle;
    if (stream->capture) return InvalidValue;
    stream->capture = std::make_shared<Capture>(Capture{stream.get(), {}});
    stream->after = {};
    return Success;
}

int cuStreamIsCapturing(void *handle, int *status) {
    enum : int { None = 0, Active = 1, Invalidated = 2 };
    BEGIN(begin_in_context(__func__));
    auto stream = find(handle);
    if (!stream) return InvalidHandle;
    *status = !stream->capture ? None : stream->capture->spoilt ? Invalidated : Active;
    return Success;
}

int cuStreamEndCapture(void *handle, void **graph) {
    BEGIN(begin_in_context(__func__));
    *graph = nullptr;
    auto stream = find(handle);
    if (!stream) return InvalidHandle;
    auto capture = stream->capture;
    if (!capture) return InvalidValue;
    if (capture->origin != stream.get()) return spoil(capture, CaptureUnmatched);
    Result result = capture->spoilt ? CaptureInvalidated : joined(*capture) ? Success : CaptureUnjoined;
    capture->origin = nullptr;
    // Events may outlive the capture.
    auto kept = std::move(capture->kept);
    for (auto &[_, other] : streams)
        if (other->capture == capture) other->capture = nullptr, other->after = {};
    if (result != Success) return result;
    auto made = std::make_unique<Graph>(Graph{std::move(capture->nodes), std::move(kept)});
    *graph = made.get();
    graphs[made.get()] = std::move(made);
    return Success;
}

int cuGraphDestroy(void *graph) {
    BEGIN(begin(__func__));
    return graphs.erase(static_cast<Graph *>(graph)) ? Success : InvalidValue;
}

int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long) {
    BEGIN(begin_in_context(__func__));
    auto found = graphs.find(static_cast<Graph *>(graph));
    if (found == graphs.end()) return InvalidValue;
    auto made = std::make_shared<Executable>(Executable{found->second->nodes});
    made->kept = found->second->kept;
    executables[made.get()] = made;
    *executable = made.get();
    return Success;
}

// Launches that were enqueued before still run.
int cuGraphExecDestroy(void *executable) {
    BEGIN(begin(__func__));
    auto found = executables.find(static_cast<Executable *>(executable));
    if (found == executables.end()) return InvalidValue;
    found->second->kept.clear();
    executables.erase(found);
    return Success;
}

int cuGraphLaunch(void *handle, void *stream) {
    Guard guard(lock);
    auto found = executables.find(static_cast<Executable *>(handle));
    if (found == executables.end()) return InvalidValue;
    auto graph = found->second;
    size_t nodes = graph->nodes.size();
    auto launch = std::make_shared<Launched>(Launched{graph, graph->launched, std::vector<bool>(nodes), nodes});
    Result result = enqueue(__func__, stream, {nullptr, nullptr, 0, nullptr, launch});
    if (result == Success) graph->launched += 1;
    return result;
}

} // extern "C"
