// Threads, warps and blocks of a grid, run on the CPU one thread at a time. Included by simt.h, which says what is simulated.
//
// A thread runs until it waits for others: on a fiber, which takes the next thread when one has ended. A warp goes on until all
// its threads wait for the block, and only then another runs: warps are as far apart as they can be. They run in order, or in
// reverse order: with a barrier missing, some order reads what is not there yet, or no longer.
//
// Blocks run one after the other, or several are in flight and take turns. A turn ends at a point: a barrier, a collective of a
// warp, an atomic, a fence, a load or store by a function. How many points a turn has is drawn from the launch's seed. Memory
// is sequentially consistent, so that a fence is a point and orders nothing.
#pragma once

// Checked jumps do not know that a stack may be left for another.
#undef _FORTIFY_SOURCE

// Only headers that are quick to read: those of containers and mutexes, and <cmath>, take longer than most kernels.
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>

// A library's own, even where another has the same: several are loaded at once.
#pragma GCC visibility push(hidden)

// Variables of this file and of simt.h, apart from those of kernels.
#define SIMT_STATE static __attribute__((section("simt_state")))

// Shared memory of all kernels: the variables without a value, of which each block in flight has a copy. The linker names where
// they are. A section of their own is not honoured in templates.
extern "C" char __bss_start[], _end[];

namespace simt {

struct Dim {
    unsigned x, y, z;
};

constexpr unsigned WARP = 32;
constexpr size_t STACK = 256 << 10;

// A growing array, of what may be moved by its bytes.
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

// A stack on which threads run, one after the other. A context is made once; jumps from then on make no system call.
struct Fiber {
    ucontext_t entry;
    char* stack = new char[STACK];
    jmp_buf left;  // where it goes on
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
    unsigned given = 0;  // what others of the warp may take
    Fiber* fiber = nullptr;
};

// A copy into a block's shared memory that is on its way.
struct BulkCopy {
    void* to;
    const void* from;
    unsigned bytes;
    unsigned long long* barrier;
};

// A block that runs, or in flight while another one does. The next one takes its place, and its fibers, when it has ended.
struct Block {
    List<Fiber*> fibers;  // which it owns
    List<Fiber*> idle;
    List<Thread> threads;
    List<BulkCopy> bulk_copies;
    unsigned from = 0, to = 0;  // the warp that runs
    unsigned begun = 0;         // threads of it that have a fiber, or had one
    Thread* current = nullptr;
    jmp_buf scheduler;
    Dim index{0, 0, 0};
    // Where several are in flight:
    Fiber* main = nullptr;   // on which its warps are scheduled
    jmp_buf left;            // where it goes on when its turn has come
    bool preempted = false;  // it goes on there, not at its main fiber's beginning
    bool ended = false;      // no further block takes its place
    char* shared = nullptr;  // its shared memory while another one runs

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

// A launch.
struct Grid {
    Dim dim{0, 0, 0}, grid{0, 0, 0};
    bool reverse = false;
    void (*call)(void**) = nullptr;
    void** args = nullptr;
    List<unsigned> blocks;  // their numbers, in the order in which they begin
    unsigned begun = 0;
    const char* error = nullptr;
    // Where several blocks are in flight:
    jmp_buf scheduler;
    Random random;
    uint64_t spread = 0, turns = 0;
};

constexpr unsigned MOST_IN_FLIGHT = 8;
constexpr uint64_t NO_END = ~0ull;

SIMT_STATE Grid grid;
SIMT_STATE Block slots[MOST_IN_FLIGHT];
SIMT_STATE Block* block = slots;
// By atomics and fences blocks tell each other things: a turn rather ends there.
constexpr uint64_t TELLING = 32;

SIMT_STATE bool several_in_flight = false;
SIMT_STATE uint64_t points_left = NO_END;  // of the turn
SIMT_STATE bool in_kernel = false;         // rather than in this file

// Ends the turn of the block that runs: back to the grid's scheduler, until it lets the block go on.
inline void preempt() {
    in_kernel = false;
    block->preempted = true;
    if (!_setjmp(block->left)) _longjmp(grid.scheduler, 1);
    in_kernel = true;
}

// Where another block may go on.
__attribute__((no_sanitize("thread"))) inline void point(uint64_t weight = 1) {
    if (points_left > weight) {
        points_left -= weight;
        return;
    }
    points_left = NO_END;
    preempt();
}

// Back to the block's scheduler, until it lets the fiber go on.
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

// Lets all others go on first, and ends the turn where several blocks are in flight.
inline void pause() {
    if (several_in_flight) points_left = 1;
    wait(Waits::PAUSED);
}

inline Thread& of_warp(unsigned i) {
    return block->threads.items[grid.reverse ? block->to - 1 - i : block->from + i];
}

// Threads to their ends, one after the other; this fiber waits when one of them does.
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

// Lets the threads `from..to` go on if all of them wait for the same.
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

// Lets each warp run as far as it comes without the others. `begin`: its threads have not begun.
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

// Whether some thread has let others go first.
inline bool release_paused() {
    bool any = false;
    for (unsigned i = 0; i < block->threads.count; i++) {
        Thread& thread = block->threads.items[i];
        if (thread.waits != Waits::PAUSED) continue;
        thread.waits = Waits::NOT, any = true;
    }
    return any;
}

// Runs one block; an error if some of its threads wait for others that never come.
inline const char* run_block(unsigned number) {
    unsigned size = grid.dim.x;
    block->index = {number, 0, 0};
    block->threads.count = 0;
    for (unsigned i = 0; i < size; i++) block->threads.push(Thread{{i, 0, 0}, Waits::NOT, 0, nullptr});
    run_warps(true);
    while (!release(0, size, Waits::ENDED)) {
        if (!release_paused() && !release(0, size, Waits::FOR_BLOCK)) {
            // Their fibers are never used again.
            block->drop_fibers();
            return "threads wait at a barrier or shuffle that others of their block never reach";
        }
        run_warps(false);
    }
    return nullptr;
}

// Runs blocks that have not begun, one after the other.
inline void run_blocks() {
    while (!grid.error && grid.begun < grid.blocks.count) grid.error = run_block(grid.blocks.items[grid.begun++]);
}

// The main fiber of a block in flight.
inline void block_main() {
    for (;;) {
        run_blocks();
        block->ended = true;
        if (!_setjmp(block->main->left)) _longjmp(grid.scheduler, 1);
    }
}

inline size_t shared_bytes() { return (size_t)(_end - __bss_start); }

// How many points the next turn has: short turns and long ones, so that a block can stand still while others end. Turns become
// longer, so that their number grows as the root of the number of points.
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
        // The linker's own variables are among them.
        std::memcpy(slot.shared, __bss_start, shared_bytes());
        slot.ended = false;
    }
    several_in_flight = true;
    grid.spread = 1 + grid.random.next() % 16, grid.turns = 0;
    List<Block*> going;
    for (unsigned i = 0; i < in_flight; i++) going.push(&slots[i]);
    while (going.count && !grid.error) {
        // The last one is the one that has just had its turn.
        unsigned others = going.count > 1 && grid.turns ? going.count - 1 : going.count;
        std::swap(going.items[grid.random.next() % others], going.items[going.count - 1]);
        enter_block(going.items[going.count - 1]);
        if (going.items[going.count - 1]->ended) going.count--;
    }
    // After an error, fibers of other blocks are never used again.
    for (unsigned i = 0; i < in_flight && grid.error; i++) {
        slots[i].drop_fibers();
        delete slots[i].main;
        slots[i].main = nullptr, slots[i].preempted = false;
    }
    block = slots, points_left = NO_END, several_in_flight = false;
}

// Numbers of blocks in the order that the seed draws; in order, or in reverse order, without one.
inline void draw_blocks(unsigned from, unsigned to, uint64_t seed) {
    grid.blocks.count = 0, grid.begun = 0;
    for (unsigned i = from; i < to; i++) grid.blocks.push(grid.reverse && !seed ? to - 1 - (i - from) : i);
    grid.random.state = seed;
    for (unsigned left = seed ? grid.blocks.count : 0; left > 1; left--)
        std::swap(grid.blocks.items[left - 1], grid.blocks.items[grid.random.next() % left]);
}

// Runs the grid with up to so many blocks in flight; null, or what went wrong.
inline const char* run_grid(unsigned in_flight) {
    grid.error = nullptr;
    if (in_flight > grid.blocks.count) in_flight = grid.blocks.count;
    if (in_flight > 1) run_in_flight(in_flight < MOST_IN_FLIGHT ? in_flight : MOST_IN_FLIGHT);
    else run_blocks();
    return grid.error;
}

}  // namespace simt
