// What a launch is told. The same memory layouts, field by field: mod.rs.

// How elements are kept in memory.
enum Format : u32 {
    SAME,    // as they are computed with
    BF16,
    F16,
    HALVES,  // the upper half of an f32 number, to nearest, and 16 bits in a second vector
};

// The vectors of one launch. Those a kernel does not know may be anything.
struct Streams {
    void* params;
    void* remainder;
    void* grads;
    void* copy;  // null: none
    void* state[5];
    u32 grads_format;
    u32 copy_format;
    u32 stochastic;  // how bf16 params and state are rounded
    u32 unused;
};

// What changes between two steps and may be decided on the device: read through a pointer, so that a captured launch
// sees it. A byte follows for each parameter that ranks count: whether the step updates it.
struct Step {
    double lr;
    double grad_scale;
    u32 skip;  // not 0: nothing is written
    u32 zero_grads;
};

// One segment: a range of the flat memory with the hyperparameters of its group. The table stays on the device; what
// changes from step to step is written there by a rule's `prepare`.
struct Row {
    u64 start;
    u64 end;
    u64 tile;   // tiles of all rows before it
    u64 key;    // of the random numbers
    u64 first;  // place among those below of the element at `start`
    // Which elements of the tensor these are: runs, equally far apart. Strided in strided.rs.
    u64 strided_first;
    u64 run;
    u64 stride;
    u64 t;      // steps done, the one at work included
    u32 flags;
    u32 param;  // its byte behind the step, or EVERY_STEP
    double lr_scale;
    double weight_decay;
    double lr_max;
    double given[11];      // the rule's own hyperparameters
    double lw;             // what of a parameter decays
    double constants[14];  // the rule's own, of this step
};

// A rule's own flags come after these.
enum Flag : u32 { COUPLED = 1, MAXIMIZE = 2, DECOUPLED = 4, FULLY_DECOUPLED = 8, OWN = 16 };

// The index in the whole tensor of the element at `place`: Strided::index.
__device__ inline u64 index_at(const Row& row, u64 place) {
    u64 along = place < row.run ? place : place / row.run * row.stride + place % row.run;
    return row.strided_first + along;
}

// Counts one more step of a row, or leaves it alone: no rank has its parameter's gradient. Then it begins behind its end, and
// its tiles have no elements.
__device__ inline bool count_row(Row& row, const Step* step) {
    constexpr u32 EVERY_STEP = ~0u;
    constexpr u64 NOWHERE = 1ull << 63;
    const u8* updated = (const u8*)(step + 1);
    bool counts = row.param == EVERY_STEP || updated[row.param];
    row.start = counts ? row.start & ~NOWHERE : row.start | NOWHERE;
    row.t += counts;
    return counts;
}

// Sets what of a parameter decays at the rate `lr`: decay.rs.
__device__ inline void set_decay(Row& row, double lr) {
    double wd = row.weight_decay;
    row.lw = row.flags & DECOUPLED         ? times(lr, wd)
             : row.flags & FULLY_DECOUPLED ? times(wd, over(lr, row.lr_max))
                                           : 0;
}

// The row whose tiles include `tile`; those before `from` end below it. The next rows come first, at twice the distance each
// time: who goes from tile to tile asks where a row ends, and finds the next one near.
template <typename R>
__device__ inline u32 find(const R* rows, u64 from, u64 count, u64 tile) {
    u64 low = from, step = 1;
    while (low + step < count && rows[low + step].tile <= tile) low += step, step *= 2;
    u64 high = low + step < count ? low + step : count;
    while (high - low > 1) {
        u64 middle = low + (high - low) / 2;
        if (rows[middle].tile <= tile) low = middle;
        else high = middle;
    }
    return (u32)low;
}

// The two ends of every element-wise rule: frame.rs.
template <typename T>
struct Frame {
    T scale, wd, lw;
    bool coupled;

    __device__ void set_from(const Row& row, const Step& step) {
        set(scale, row.flags & MAXIMIZE ? -step.grad_scale : step.grad_scale);
        set(wd, row.weight_decay);
        set(lw, row.lw);
        coupled = row.flags & COUPLED;
    }

    __device__ T gradient(T p, T g) const {
        T scaled = times(g, scale);
        return coupled ? fused(wd, p, scaled) : scaled;
    }

    __device__ T descend(T p, T step) const { return minus(p, fused(lw, p, step)); }
};
