// State of the process, and the injected fault.

#include "state.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace nccl_standin {

// Never destroyed, because threads may call until the process has ended.
std::mutex &lock = *new std::mutex;
std::map<Comm *, Handle> &comms = *new std::map<Comm *, Handle>;
std::map<uintptr_t, size_t> &allocations = *new std::map<uintptr_t, size_t>;
std::map<Window *, std::unique_ptr<Window>> &windows = *new std::map<Window *, std::unique_ptr<Window>>;
std::atomic<size_t> launches{0};
thread_local int depth = 0;
thread_local std::vector<std::pair<Handle, Operation>> grouped;
thread_local std::string last_error = "nothing went wrong";
Plan &plan = *new Plan;

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

namespace {

const bool planned_at_start = [] {
    if (const char *text = std::getenv("MESHSTEP_STANDIN_NCCL")) set_plan(text);
    return true;
}();

} // namespace

Result fail(Result result, const std::string &text) {
    last_error = text;
    return result;
}

void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

} // namespace nccl_standin
