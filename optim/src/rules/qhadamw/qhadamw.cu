// QHAdamW over a flat vector, with one to four moments. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m v and writes p m v, 28 bytes an element; each further moment takes 8 more.

// constants: the moments', b2 w2 bc2s eps lr, of given: the moments', beta2 eps
__device__ inline void qhadamw_constants(Row& row, double lr) {
    double beta2 = row.given[MIX], *c = row.constants + MIX;
    set_decay(row, lr);
    mix_constants(row, true);
    c[0] = beta2, c[1] = minus(1.0, beta2);
    c[2] = root(minus(1.0, power(beta2, row.t)));
    c[3] = row.given[MIX + 1], c[4] = lr;
}

template <typename Number, int MOMENTS>
struct QhAdamW {
    typedef Number T;
    static constexpr int STATES = MOMENTS + 1;
    Frame<T> frame;
    Mix<T, MOMENTS> mix;
    T b2, w2, bc2s, eps, lr;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        mix.set_from(row);
        const double* c = row.constants + MIX;
        set(b2, c[0]), set(w2, c[1]), set(bc2s, c[2]), set(eps, c[3]), set(lr, c[4]);
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[STATES]) const {
        T g1 = frame.gradient(p, g), &v = s[MOMENTS];
        T u = mix.step(g1, s);
        v = fused(times(w2, g1), g1, times(b2, v));
        T den = plus(over(root(v), bc2s), eps);
        p = frame.descend(p, over(times(lr, u), den));
    }
};

// With so many moments.
#define FORM(N)                                        \
    typedef QhAdamW<float, N> QhAdamW##N;              \
    typedef QhAdamW<double, N> QhAdamW##N##Long;       \
    PREPARE(qhadamw_##N, qhadamw_constants)            \
    KERNELS(qhadamw_##N, QhAdamW##N, QhAdamW##N##Long) \
    KERNELS_BF16_STATE(qhadamw_##N, QhAdamW##N)

FORM(1)
FORM(2)
FORM(3)
FORM(4)
