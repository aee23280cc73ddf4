// One pass over a table of segments. The arithmetic is a rule's `update` of one element.

// What a pass works on: where, and which random bits. A rule with `S` state vectors, each in STATE.
template <typename Rule, u32 PARAMS, u32 STATE>
struct Pass {
    typedef typename Rule::T T;
    static constexpr int S = Rule::STATES, N = OWNED<T>;
    typedef Vector<T, PARAMS> Params;
    typedef Vector<T, STATE> State;

    const Streams& s;
    const Row& row;
    Rule rule;
    bool zero_grads;

    // Whether each stream of a whole tile can be moved 16 bytes at a time.
    __device__ bool aligned(u64 start) const {
        u64 wide = sizeof(T), grads = s.grads_format == SAME ? wide : 2;
        u64 all = (u64)s.params + start * (PARAMS == SAME ? wide : 2);
        if (PARAMS == HALVES) all |= (u64)s.remainder + start * 2;
        all |= (u64)s.grads + start * grads;
        if (s.copy) all |= (u64)s.copy + start * 2;
        for (int k = 0; k < S; k++) all |= (u64)s.state[k] + start * (STATE == SAME ? wide : 2);
        return all % 16 == 0;
    }

    __device__ u64 place(u64 i) const { return row.first + (i - row.start); }

    // The elements of a tile one by one.
    __device__ void each(const Tile& tile) const {
#pragma unroll 1
        for (u64 i = tile.start + threadIdx.x; i < tile.start + tile.len; i += THREADS) {
            T p = Params::read(s.params, s.remainder, i), g = Grads<T>::read(s, i), x[S ? S : 1];
#pragma unroll
            for (int k = 0; k < S; k++) x[k] = State::read(s.state[k], nullptr, i);
            rule.update(p, g, x);
            write<PARAMS>(s.params, s.remainder, i, p, 0);
#pragma unroll
            for (int k = 0; k < S; k++) write<STATE>(s.state[k], nullptr, i, x[k], (u32)k + 1);
            write_copy(s, i, p);
            if (zero_grads) Grads<T>::zero(s, i);
        }
    }

    template <u32 FORMAT>
    __device__ void write(void* base, void* second, u64 i, T value, u32 stream) const {
        if constexpr (FORMAT == BF16) {
            if (s.stochastic) {
                ((u16*)base)[i] = (u16)round_at_random(value, Bits(row, stream).of(index_at(row, place(i))));
                return;
            }
        }
        Vector<T, FORMAT>::write(base, second, i, value);
    }

    // A whole tile, 16 bytes at a time.
    __device__ void whole(u64 start) const {
        Params params;
        State state[S ? S : 1];
        Grads<T> grads;
        // All loads before any arithmetic: they are on their way together.
        grads.load(s, start);
        params.load(s.params, s.remainder, start);
#pragma unroll
        for (int k = 0; k < S; k++) state[k].load(s.state[k], nullptr, start);
        T p[N], g[N], x[S ? S : 1][N];
        grads.get_all(g, s);
#pragma unroll
        for (int i = 0; i < N; i++) {
            T one[S ? S : 1];
            p[i] = params.get(i);
#pragma unroll
            for (int k = 0; k < S; k++) one[k] = state[k].get(i);
            rule.update(p[i], g[i], one);
#pragma unroll
            for (int k = 0; k < S; k++) x[k][i] = one[k];
        }
#pragma unroll
        for (int k = 0; k < S; k++) store(state[k], s.state[k], nullptr, start, x[k], (u32)k + 1);
        store(params, s.params, s.remainder, start, p, 0);
        copy_tile(s, start, p);
        if (zero_grads) Grads<T>::zero_tile(s, start);
    }

    template <u32 FORMAT>
    __device__ void store(
        Vector<T, FORMAT>& vector, void* base, void* second, u64 start, const T (&values)[N], u32 stream) const {
        if constexpr (FORMAT == BF16) {
            if (s.stochastic) {
                Narrow random;
                Bits(row, stream).of_tile(random, place(start));
                u32 peak = 0;
#pragma unroll
                for (int i = 0; i < N; i++) peak = magnitude(values[i]) > peak ? magnitude(values[i]) : peak;
                if (rounds_simply(peak)) {
#pragma unroll
                    for (int i = 0; i < N; i += 2)
                        vector.x.w[i / 2] = round_simply_at_random(values[i], values[i + 1], random.w[i / 2]);
                } else {
#pragma unroll
                    for (int i = 0; i < N; i++) vector.x.put(i, round_at_random(values[i], random.get(i)));
                }
                return vector.store(base, second, start);
            }
        }
#pragma unroll
        for (int i = 0; i < N; i++) vector.put(i, values[i]);
        vector.store(base, second, start);
    }
};

// Any number of blocks gives the same result.
template <typename Rule, u32 PARAMS, u32 STATE>
__device__ inline void sweep(const Streams& s, const Row* rows, u64 count, u64 tiles, const Step* step) {
    if (step->skip) return;
    Rule rule;
    u32 at = ~0u;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (at == ~0u || tile_begin<typename Rule::T>(rows[at], tile) >= rows[at].end) {
            at = find(rows, at == ~0u ? 0 : at, count, tile);
            rule.set_from(rows[at], *step);
        }
        const Row& row = rows[at];
        Tile part = tile_of<typename Rule::T>(row, tile);
        Pass<Rule, PARAMS, STATE> pass{s, row, rule, step->zero_grads != 0};
        // The bits of elements that are no neighbours in their tensor are drawn one by one: to find a run among so many live
        // numbers would cost every kernel registers.
        bool together = !s.stochastic || row.run >> 63;
        if (part.len == TILE<typename Rule::T> && together && pass.aligned(part.start)) pass.whole(part.start);
        else pass.each(part);
    }
}

// Before a pass: what a rule's CONSTANTS makes of each row that is updated, for one more step at the rate `lr`. A skipped step
// does not count.
#define PREPARE(NAME, CONSTANTS)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                 \
        NAME##_prepare(Row* rows, u64 count, const Step* step) {                                          \
        if (step->skip) return;                                                                           \
        u64 threads = (u64)gridDim.x * THREADS;                                                           \
        for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += threads) {                  \
            if (count_row(rows[i], step)) CONSTANTS(rows[i], times(step->lr, rows[i].lr_scale));          \
        }                                                                                                 \
    }

// Blocks of a multiprocessor, which bound the registers of rules with few state vectors. Kernels that draw random bits compute much
// for the bytes they move: other warps must compute while one waits for memory.
template <typename Rule, u32 PARAMS, u32 STATE>
constexpr u32 RESIDENT = Rule::STATES > 2 || (PARAMS == SAME && STATE == SAME) ? 1
    : PARAMS != SAME && STATE == BF16                                          ? 4
                                                                               : 3;

#define KERNEL(NAME, RULE, PARAMS, STATE)                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, (RESIDENT<RULE, PARAMS, STATE>))          \
        NAME(const Streams s, const Row* rows, u64 count, u64 tiles, const Step* step) {     \
        sweep<RULE, PARAMS, STATE>(s, rows, count, tiles, step);                             \
    }

// A rule's kernels, one for each way of keeping parameters. WIDE and LONG are the rule in f32 and f64.
#define KERNELS(NAME, WIDE, LONG)                     \
    KERNEL(NAME##_f32, WIDE, SAME, SAME)              \
    KERNEL(NAME##_bf16_remainder, WIDE, HALVES, SAME) \
    KERNEL(NAME##_bf16, WIDE, BF16, SAME)             \
    KERNEL(NAME##_f64, LONG, SAME, SAME)

// The same with bf16 state.
#define KERNELS_BF16_STATE(NAME, WIDE)                           \
    KERNEL(NAME##_f32_state_bf16, WIDE, SAME, BF16)              \
    KERNEL(NAME##_bf16_remainder_state_bf16, WIDE, HALVES, BF16) \
    KERNEL(NAME##_bf16_state_bf16, WIDE, BF16, BF16)
