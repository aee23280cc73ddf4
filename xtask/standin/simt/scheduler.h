// Runs threads, warps and blocks of a grid on the CPU, one thread at a time. Included by simt.h, which describes what is
// simulated.
//
// A thread runs on a fiber until it waits for other threads; when a thread ends, its fiber takes the next thread. A warp
// runs until all its threads wait for the block, and only then another warp runs: warps are as far apart as possible. Warps
// run in order, or in reverse order: if a barrier is missing, one of these orders reads data too early or too late.
//
// Blocks run one after the other, or several are in flight and take turns. A turn ends at a point: a barrier, a collective
// of a warp, an atomic, a fence, or a load or store by a function. The number of points in a turn is drawn from the
// launch's seed. Memory is sequentially consistent, so a fence is a point but orders nothing.
#pragma once

// The checked longjmp of glibc rejects jumps to another stack.
#undef _FORTIFY_SOURCE

// Only headers that compile quickly: containers, mutexes and <cmath> take longer than most kernels.
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>

// Hidden, so that each loaded library has its own symbols although other libraries define the same names.
#pragma GCC visibility push(hidden)

// Section for the variables of this file and of simt.h, separate from the kernels' variables.
#define SIMT_STATE static __attribute__((section("simt_state")))

// Shared memory of all kernels: the uninitialised variables, of which each block in flight has a copy. The linker defines
// their bounds. A section attribute would not work, because the compiler ignores it in templates.
extern "C" char __bss_start[], _end[];

namespace simt {

struct Dim {
    unsigned x, y, z;
};

constexpr unsigned WARP = 32;
constexpr size_t STACK = 256 << 10;

// A growing array of trivially relocatable items.
template <typename T>
struct List {
    T* items = nullptr;
    unsigned count = 0, room = 0;

    List() = default;
    List(const List&) = delete;
    List& operator=(const List&) = delete;
    ~List() { std::free(items); }

    void push(T item) {
        if (count == room) {
            room = 2 * room + 8;
            items = (T*)std::realloc((void*)items, room * sizeof(T));
            if (!items) std::abort();
        }
        items[count++] = item;
    }
};

// A stack for threads that run one after the other. The context is created once; later jumps make no system call.
struct Fiber {
    ucontext_t entry;
    char* stack = new char[STACK];
    jmp_buf left;  // point of resumption
    bool entered = false;

    explicit Fiber(void (*main)()) {
        getcontext(&entry);
        entry.uc_stack.ss_sp = stack;
        entry.uc_stack.ss_size = STACK;
        entry.uc_link = nullptr;
        makecontext(&entry, main, 0);
    }
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber() { delete[] stack; }
};

enum class Waits { NOT, FOR_WARP, FOR_BLOCK, PAUSED, ENDED };

struct Thread {
    Dim index{0, 0, 0};
    Waits waits = Waits::NOT;
    unsigned given = 0;  // value offered to the other threads of the warp
    Fiber* fiber = nullptr;
};

// State of a running block, or of a block in flight while another one runs. After its end, the next block reuses the slot
// and its fibers.
struct Block {
    List<Fiber*> fibers;  // all fibers of this slot, which owns them
    List<Fiber*> idle;
    List<Thread> threads;
    unsigned from = 0, to = 0;  // threads of the running warp
    unsigned begun = 0;         // threads of the warp that have begun
    Thread* current = nullptr;
    jmp_buf scheduler;
    Dim index{0, 0, 0};
    // With several blocks in flight:
    Fiber* main = nullptr;   // schedules the block's warps
    jmp_buf left;            // point of resumption at the next turn
    bool preempted = false;  // resume at `left`, not on the main fiber
    bool ended = false;      // no further block takes this slot
    char* shared = nullptr;  // shared memory while another block runs

    Block() = default;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() {
        drop_fibers();
        delete main;
        delete[] shared;
    }

    void drop_fibers() {
        while (fibers.count) delete fibers.items[--fibers.count];
        idle.count = 0;
    }
};

// The finalizer of splitmix64.
struct Random {
    uint64_t state = 0;

    uint64_t next() {
        uint64_t x = state += 0x9E3779B97F4A7C15u;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        x = (x ^ x >> 27) * 0x94D049BB133111EBu;
        return x ^ x >> 31;
    }
};

// State of a launch.
struct Grid {
    Dim dim{0, 0, 0}, grid{0, 0, 0};
    bool reverse = false;
    void (*call)(void**) = nullptr;
    void** args = nullptr;
    List<unsigned> blocks;  // block numbers in the order in which they begin
    unsigned begun = 0;
    const char* error = nullptr;
    // With several blocks in flight:
    jmp_buf scheduler;
    Random random;
    uint64_t spread = 0, turns = 0;
};

constexpr unsigned MOST_IN_FLIGHT = 8;
constexpr uint64_t NO_END = ~0ull;

SIMT_STATE Grid grid;
SIMT_STATE Block slots[MOST_IN_FLIGHT];
SIMT_STATE Block* block = slots;
// Points of an atomic or a fence. Blocks communicate by atomics and fences, so turns end there more often.
constexpr uint64_t TELLING = 32;

SIMT_STATE bool several_in_flight = false;
SIMT_STATE uint64_t points_left = NO_END;  // of the current turn
SIMT_STATE bool in_kernel = false;         // false in the scheduler's own code

// Ends the turn of the running block: returns to the grid's scheduler until the block's next turn.
inline void preempt() {
    in_kernel = false;
    block->preempted = true;
    if (!_setjmp(block->left)) _longjmp(grid.scheduler, 1);
    in_kernel = true;
}

// A point at which another block may run.
__attribute__((no_sanitize("thread"))) inline void point(uint64_t weight = 1) {
    if (points_left > weight) {
        points_left -= weight;
        return;
    }
    points_left = NO_END;
    preempt();
}

// Returns to the block's scheduler until it resumes the fiber.
inline void leave(Fiber* fiber) {
    in_kernel = false;
    if (!_setjmp(fiber->left)) _longjmp(block->scheduler, 1);
}

inline void wait(Waits what) {
    point();
    Thread* self = block->current;
    self->waits = what;
    leave(self->fiber);
    in_kernel = true;
}

// Lets all other threads run first, and ends the turn if several blocks are in flight.
inline void pause() {
    if (several_in_flight) points_left = 1;
    wait(Waits::PAUSED);
}

inline Thread& of_warp(unsigned i) {
    return block->threads.items[grid.reverse ? block->to - 1 - i : block->from + i];
}

// Runs threads to their ends, one after the other; the fiber is suspended when a thread waits.
inline void run_threads(Fiber* self) {
    while (block->begun < block->to - block->from) {
        Thread& thread = of_warp(block->begun++);
        thread.fiber = self;
        block->current = &thread;
        in_kernel = true;
        grid.call(grid.args);
        in_kernel = false;
        thread.waits = Waits::ENDED;
    }
}

inline void fiber_main() {
    Fiber* self = block->fibers.items[block->fibers.count - 1];
    for (;;) {
        run_threads(self);
        block->idle.push(self);
        leave(self);
    }
}

inline void enter(Fiber* fiber) {
    if (_setjmp(block->scheduler)) return;
    if (fiber->entered) _longjmp(fiber->left, 1);
    fiber->entered = true;
    setcontext(&fiber->entry);
}

inline Fiber* some_fiber() {
    if (block->idle.count) return block->idle.items[--block->idle.count];
    block->fibers.push(new Fiber(fiber_main));
    return block->fibers.items[block->fibers.count - 1];
}

// Releases the threads `from..to` if all of them wait for `what`.
inline bool release(unsigned from, unsigned to, Waits what) {
    for (unsigned i = from; i < to; i++)
        if (block->threads.items[i].waits != what) return false;
    for (unsigned i = from; i < to; i++) block->threads.items[i].waits = Waits::NOT;
    return true;
}

inline void resume_warp() {
    for (unsigned i = 0; i < block->to - block->from; i++) {
        Thread& thread = of_warp(i);
        if (thread.waits != Waits::NOT) continue;
        block->current = &thread;
        enter(thread.fiber);
    }
}

// Runs each warp until it waits for other warps. With `begin`, the warps' threads start.
inline void run_warps(bool begin) {
    unsigned size = grid.dim.x, warps = (size + WARP - 1) / WARP;
    for (unsigned i = 0; i < warps; i++) {
        block->from = (grid.reverse ? warps - 1 - i : i) * WARP;
        block->to = block->from + WARP < size ? block->from + WARP : size;
        block->begun = begin ? 0 : block->to - block->from;
        while (block->begun < block->to - block->from) enter(some_fiber());
        do resume_warp();
        while (release(block->from, block->to, Waits::FOR_WARP));
    }
}

// Releases paused threads. Returns true if there were any.
inline bool release_paused() {
    bool any = false;
    for (unsigned i = 0; i < block->threads.count; i++) {
        Thread& thread = block->threads.items[i];
        if (thread.waits != Waits::PAUSED) continue;
        thread.waits = Waits::NOT, any = true;
    }
    return any;
}

// Runs one block. Returns an error if threads wait for other threads that never come.
inline const char* run_block(unsigned number) {
    unsigned size = grid.dim.x;
    block->index = {number, 0, 0};
    block->threads.count = 0;
    for (unsigned i = 0; i < size; i++) block->threads.push(Thread{{i, 0, 0}, Waits::NOT, 0, nullptr});
    run_warps(true);
    while (!release(0, size, Waits::ENDED)) {
        if (!release_paused() && !release(0, size, Waits::FOR_BLOCK)) {
            // The waiting fibers cannot be resumed.
            block->drop_fibers();
            return "threads wait at a barrier or shuffle that others of their block never reach";
        }
        run_warps(false);
    }
    return nullptr;
}

// Runs the remaining blocks one after the other.
inline void run_blocks() {
    while (!grid.error && grid.begun < grid.blocks.count) grid.error = run_block(grid.blocks.items[grid.begun++]);
}

// Main function of a slot's main fiber.
inline void block_main() {
    for (;;) {
        run_blocks();
        block->ended = true;
        if (!_setjmp(block->main->left)) _longjmp(grid.scheduler, 1);
    }
}

inline size_t shared_bytes() { return (size_t)(_end - __bss_start); }

// Draws the number of points of the next turn: short and long turns, so that a block can stand still while others end.
// Turns become longer, so that their number grows as the square root of the number of points.
inline uint64_t draw_turn() {
    uint64_t most = 1ull << grid.random.next() % grid.spread;
    return 1 + grid.random.next() % (most * (1 + grid.turns++ / 32));
}

// Gives a block its turn.
inline void enter_block(Block* next) {
    std::memcpy(__bss_start, next->shared, shared_bytes());
    block = next;
    points_left = draw_turn();
    if (!_setjmp(grid.scheduler)) {
        if (block->preempted) {
            block->preempted = false;
            _longjmp(block->left, 1);
        }
        if (block->main->entered) _longjmp(block->main->left, 1);
        block->main->entered = true;
        setcontext(&block->main->entry);
    }
    std::memcpy(block->shared, __bss_start, shared_bytes());
}

inline void run_in_flight(unsigned in_flight) {
    for (unsigned i = 0; i < in_flight; i++) {
        Block& slot = slots[i];
        if (!slot.main) slot.main = new Fiber(block_main);
        if (!slot.shared) slot.shared = new char[shared_bytes()];
        // The linker's own variables also lie in this range.
        std::memcpy(slot.shared, __bss_start, shared_bytes());
        slot.ended = false;
    }
    several_in_flight = true;
    grid.spread = 1 + grid.random.next() % 16, grid.turns = 0;
    List<Block*> going;
    for (unsigned i = 0; i < in_flight; i++) going.push(&slots[i]);
    while (going.count && !grid.error) {
        // The last block of the list had the previous turn.
        unsigned others = going.count > 1 && grid.turns ? going.count - 1 : going.count;
        std::swap(going.items[grid.random.next() % others], going.items[going.count - 1]);
        enter_block(going.items[going.count - 1]);
        if (going.items[going.count - 1]->ended) going.count--;
    }
    // After an error, the fibers of other blocks cannot be resumed.
    for (unsigned i = 0; i < in_flight && grid.error; i++) {
        slots[i].drop_fibers();
        delete slots[i].main;
        slots[i].main = nullptr, slots[i].preempted = false;
    }
    block = slots, points_left = NO_END, several_in_flight = false;
}

// Puts the block numbers into an order drawn from the seed; without a seed, in ascending or descending order.
inline void draw_blocks(unsigned from, unsigned to, uint64_t seed) {
    grid.blocks.count = 0, grid.begun = 0;
    for (unsigned i = from; i < to; i++) grid.blocks.push(grid.reverse && !seed ? to - 1 - (i - from) : i);
    grid.random.state = seed;
    for (unsigned left = seed ? grid.blocks.count : 0; left > 1; left--)
        std::swap(grid.blocks.items[left - 1], grid.blocks.items[grid.random.next() % left]);
}

// Runs the grid with up to `in_flight` blocks in flight. Returns null, or an error text.
inline const char* run_grid(unsigned in_flight) {
    grid.error = nullptr;
    if (in_flight > grid.blocks.count) in_flight = grid.blocks.count;
    if (in_flight > 1) run_in_flight(in_flight < MOST_IN_FLIGHT ? in_flight : MOST_IN_FLIGHT);
    else run_blocks();
    return grid.error;
}

}  // namespace simt
