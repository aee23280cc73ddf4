// What follows from a step's exchange, decided where it arrives: the factor on gradients, whether anything is written, the next
// loss scale. One block, of which one thread decides. Bit for bit: clip.rs, loss_scale.rs, exact.rs, in the order of shard's
// step.rs.
//
// The exchange has two vectors. Summed over ranks: elements that are not finite, weight, the norm's words, then two parameters
// a word, how many ranks have a gradient for each; at last what is 0 where ranks that compute the same micro-batches weigh them
// alike. The largest of all ranks: bits of the largest gradient, fault, digest and
// its complement, then for each parameter that none or all must have a gradient for, the fault of a rank without; at last the
// fields of the digest and their complements, to say which of them differ.
//
// Behind the settings, the step and what was decided there is a byte for each parameter that is counted: whether this rank has
// its gradient; whether any has, so that it is updated.

constexpr u32 BAD = 0, WEIGHT = 1, HEAD = 2, COUNTS = HEAD + WORDS;
constexpr u32 PEAK = 0, FAULT = 1, DIGEST = 2, NOT_DIGEST = 3, LACKING = 4;
constexpr u32 FIELDS = 10;

enum Combine : u32 { MEAN, SUM, WEIGHTED };

struct Settings {
    // Of the step, the same on every rank.
    double lr;
    double max_norm;  // infinite: no clipping
    double grad_scale;
    u64 batches;
    u64 launches;
    u64 rules;  // a digest of hyperparameters
    // Of this rank.
    u64 rank;
    u64 weight;
    u64 balance;  // adds up to 0 over all ranks where those that are to have weighed the same alike have
    u64 fault;    // 0: none; below the faults, a request to end the run
    // Of the run.
    u64 world_size;
    u64 params;  // of those counted, the ones whose presence must be the same on all ranks: all or 0
    double growth_factor;
    double backoff_factor;
    double min_scale;
    u64 growth_interval;
    u64 hysteresis;
    u32 dynamic;  // whether the loss scale follows overflows
    u32 combine;
    u32 norm;
    u32 clips;  // whether max_norm limits the combined gradient
    u32 max_skips;
    u32 zero_grads;
    u64 propagates;  // whether a step is taken whatever the gradients hold
};

// What goes on from step to step.
struct Progress {
    u64 steps;
    double scale;  // the loss scale; 1 where there is none
    u64 growth_tracker;
    u64 hysteresis_tracker;
    u32 skips;     // in a row
    u32 hopeless;  // of these, those after which the scale could not fall
};

enum Verdict : u32 { APPLIED, SKIPPED, FAULTY, PARTED, UNEVEN, WEIGHTLESS, TOO_MANY_SKIPS, NO_NORM, UNBALANCED };

struct Decided {
    double norm;
    double coef;
    u64 non_finite;
    u64 weight;
    u64 fault;
    u64 param;  // the first that some ranks have a gradient for and some do not; where ranks have parted, the first field
    u64 mine;   // which differs: this rank's,
    u64 smallest;
    u64 largest;
    u32 verdict;
    u32 in_a_row;
};

// The caller's factor on gradients over the scale their losses had.
__device__ inline double unscale(const Settings& s, const Progress& p) { return over(s.grad_scale, p.scale); }

__device__ inline u64 mix(u64 so_far, u64 word) {
    return ((so_far << 5 | so_far >> 59) ^ word) * 0x517CC1B727220A95ull;
}

// What must be the same on every rank. None of the numbers is negative where this is looked at, so their bits order as they do.
struct Fields {
    u64 of[FIELDS];

    __device__ Fields(const Settings& s, const Progress& p)
        : of{p.steps, bits(s.lr), bits(s.max_norm), bits(s.grad_scale), bits(p.scale),
             p.growth_tracker, p.hysteresis_tracker, s.batches, s.launches, s.rules} {}

    __device__ static u64 bits(double x) { return (u64)__double_as_longlong(x); }

    __device__ u64 digest() const {
        u64 so_far = 0;
        for (u64 field : of) so_far = mix(mix(so_far, field + 1), 0);
        return so_far;
    }

    __device__ void bring(u64* max) const {
#pragma unroll
        for (u32 i = 0; i < FIELDS; i++) max[i] = of[i], max[FIELDS + i] = ~of[i];
    }

    // Which is the first that differs; the last if none does.
    __device__ void tell(const u64* max, Decided& d) const {
        bool found = false;
#pragma unroll
        for (u32 i = 0; i < FIELDS; i++) {
            u64 largest = max[i], smallest = ~max[FIELDS + i];
            if (!found) d.param = i, d.mine = of[i], d.smallest = smallest, d.largest = largest;
            found |= largest != smallest;
        }
    }
};

// Below the faults a word may ask for the end of the run, which fails no step.
__device__ inline bool is_fault(u64 word) { return word >> 56 != 0; }

// A fault of this rank: graver ones are larger, of equal ones the lowest rank's is.
__device__ inline u64 fault_of(const Settings& s, u64 code, u64 param) {
    return code << 56 | (0xFFFFFF - (s.rank & 0xFFFFFF)) << 32 | (param & 0xFFFFFFFF);
}

// Writes what this rank brings besides its norm. One block; bytes behind the last parameter's are 0.
extern "C" __global__ void __launch_bounds__(THREADS)
    decide_bring(const Settings* settings, const Progress* progress, u64* sum, u64* max, u64 counted) {
    const Settings& s = *settings;
    const u8* here = (const u8*)(settings + 1);
    for (u64 pair = threadIdx.x; pair < (counted + 1) / 2; pair += THREADS)
        sum[COUNTS + pair] = here[2 * pair] | (u64)here[2 * pair + 1] << 32;
    for (u64 i = threadIdx.x; i < s.params; i += THREADS) max[LACKING + i] = here[i] ? 0 : fault_of(s, 1, i);
    if (threadIdx.x != 0) return;
    double factor = unscale(s, *progress);
    // A scale that the host has not seen may make a factor too small or too large for f32.
    u64 bad_scale = fault_of(s, 4, 0);
    sum[WEIGHT] = s.weight;
    sum[COUNTS + (counted + 1) / 2] = s.balance;
    max[FAULT] = is_fault(s.fault) || (factor >= 1e-30 && factor <= 1e30) ? s.fault : bad_scale;
    Fields fields(s, *progress);
    max[DIGEST] = fields.digest();
    max[NOT_DIGEST] = ~max[DIGEST];
    fields.bring(max + LACKING + s.params);
}

__device__ inline double finish(u32 norm, const u64* words, u64 max_bits) {
    return norm == L1 ? nearest(words) : norm == L2 ? root_of(words) : __longlong_as_double((long long)max_bits);
}

// The norm of gradients that are multiplied by `factor`: infinite where some are not finite. Words are carried.
__device__ inline double told(const Settings& s, const u64* sum, const u64* max, const u64* words, double factor) {
    if (sum[BAD]) return __longlong_as_double(0x7FFll << 52);
    return times(factor, finish(s.norm, words, max[PEAK]));
}

// What gradients are multiplied by before they are clipped.
__device__ inline double factor_of(const Settings& s, const Progress& p, u64 weight) {
    double combined = s.combine == MEAN       ? over(1, __ull2double_rn(s.batches))
                      : s.combine == WEIGHTED ? over(1, __ull2double_rn(weight))
                                              : 1;
    return times(unscale(s, p), combined);
}

// min(1, max_norm / (norm + 1e-6)).
__device__ inline double clip_coef(double norm, double max_norm) {
    double coef = over(max_norm, plus(norm, 1e-6));
    return coef < 1 ? coef : 1;
}

// The verdict, but for how many steps may be skipped; `grad_scale` is set where the step is applied. Words are carried.
__device__ inline Decided judge(const Settings& s, const Progress& p, const u64* sum, const u64* max, const u64* words,
                                u64 uneven, u64 balance, double& grad_scale) {
    Decided d = {0, 1, sum[BAD], sum[WEIGHT], max[FAULT], uneven, 0, 0, 0, APPLIED, 0};
    auto with = [&](Verdict verdict) {
        d.verdict = verdict;
        return d;
    };
    if (is_fault(d.fault)) return with(FAULTY);
    if (max[DIGEST] != ~max[NOT_DIGEST]) {
        Fields(s, p).tell(max + LACKING + s.params, d);
        return with(PARTED);
    }
    if (uneven < s.params) return with(UNEVEN);
    if (balance) return with(UNBALANCED);
    if (s.combine == WEIGHTED && d.weight == 0) return with(WEIGHTLESS);
    if (d.non_finite && !s.propagates) return with(SKIPPED);
    double factor = factor_of(s, p, d.weight);
    d.norm = told(s, sum, max, words, factor);
    bool clips = s.clips && s.max_norm < __longlong_as_double(0x7FFll << 52);
    if (clips && !(d.norm >= 0)) return with(NO_NORM);
    d.coef = clips ? clip_coef(d.norm, s.max_norm) : 1;
    grad_scale = times(factor, d.coef);
    return d;
}

// Lets the loss scale follow the step that has used it.
__device__ inline void rescale(const Settings& s, Progress& p, bool overflow) {
    if (!s.dynamic) return;
    if (overflow) {
        p.growth_tracker = 0;
        p.hysteresis_tracker -= p.hysteresis_tracker > 0;
        if (p.hysteresis_tracker) return;
        double lower = times(p.scale, s.backoff_factor);
        p.scale = lower > s.min_scale ? lower : s.min_scale;
        return;
    }
    p.growth_tracker += p.growth_tracker < ~0ull;
    if (p.growth_tracker < s.growth_interval) return;
    double larger = times(p.scale, s.growth_factor);
    if (larger >= 1e-24 && larger <= 1e24) p.scale = larger;
    p.growth_tracker = 0;
    p.hysteresis_tracker = s.hysteresis;
}

// Takes in a verdict. After an error nothing has changed, except that one skip too many is counted.
__device__ inline void advance(const Settings& s, Progress& p, Decided& d) {
    if (d.verdict == SKIPPED) {
        p.skips++;
        p.hopeless = s.dynamic && p.scale > s.min_scale ? 0 : p.hopeless + 1;
        d.in_a_row = p.skips;
        if (p.hopeless > s.max_skips) d.verdict = TOO_MANY_SKIPS;
    } else if (d.verdict == APPLIED) {
        p.skips = p.hopeless = 0;
    }
    if (d.verdict > SKIPPED) return;
    rescale(s, p, d.verdict == SKIPPED);
    p.steps++;
}

// One block.
extern "C" __global__ void __launch_bounds__(THREADS) decide(
    const Settings* settings, Progress* progress, const u64* sum, const u64* max, Step* step, Decided* decided,
    u64 counted) {
    __shared__ u64 words[WORDS], even;
    const Settings& s = *settings;
    if (threadIdx.x < WORDS) words[threadIdx.x] = sum[HEAD + threadIdx.x];
    if (threadIdx.x == 0) even = ~s.params;
    __syncthreads();
    // The complement of the first parameter that is uneven is the largest; where none needs to be even, all ones are there.
    u8 *updated = (u8*)(step + 1), *told = (u8*)(decided + 1);
    for (u64 i = threadIdx.x; i < counted; i += THREADS) {
        u32 count = (u32)(sum[COUNTS + i / 2] >> i % 2 * 32);
        updated[i] = told[i] = count != 0;
        if (count != 0 && count != s.world_size) atomicMax(&even, ~i);
    }
    __syncthreads();
    if (threadIdx.x != 0) return;
    carry(words);
    Progress p = *progress;
    double grad_scale = 0;
    // The factor is made of the scale the losses had; only then the scale moves.
    Decided d = judge(s, p, sum, max, words, ~even, sum[COUNTS + (counted + 1) / 2], grad_scale);
    advance(s, p, d);
    if (d.verdict == UNEVEN) d.fault = max[LACKING + d.param];
    *progress = p;
    *decided = d;
    *step = Step{s.lr, grad_scale, d.verdict != APPLIED, s.zero_grads};
}

// Writes the norm of a step that was decided before it was known, from vectors that were exchanged again; steps that are taken
// whatever the gradients hold have a loss scale that stays. One block.
extern "C" __global__ void __launch_bounds__(THREADS) decide_norm(
    const Settings* settings, const Progress* progress, const u64* sum, const u64* max, Decided* decided) {
    __shared__ u64 words[WORDS];
    if (threadIdx.x < WORDS) words[threadIdx.x] = sum[HEAD + threadIdx.x];
    __syncthreads();
    if (threadIdx.x != 0 || decided->verdict != APPLIED) return;
    carry(words);
    decided->non_finite = sum[BAD];
    decided->norm = told(*settings, sum, max, words, factor_of(*settings, *progress, decided->weight));
}
