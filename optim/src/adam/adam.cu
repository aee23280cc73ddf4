// Adam, AdamW and AMSGrad over a flat vector. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m v and writes p m v: 28 bytes an element.

// The larger; NaN if one is.
template <typename T>
__device__ inline T larger(T x, T y) {
    return y > x ? y : y <= x ? x : plus(x, y);
}

template <typename Number, bool AMSGRAD>
struct Adam {
    typedef Number T;
    static constexpr int STATES = AMSGRAD ? 3 : 2;
    Frame<T> frame;
    T w1, b2, w2, bc2s, eps, step;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* own = row.constants + OWN;
        set(w1, own[0]), set(b2, own[1]), set(w2, own[2]);
        set(bc2s, own[3]), set(eps, own[4]), set(step, own[5]);
    }

    // One element; the only arithmetic of this file.
    __device__ void update(T& p, T g, T (&s)[STATES]) const {
        T g1 = frame.gradient(p, g);
        s[0] = fused(w1, minus(g1, s[0]), s[0]);
        s[1] = fused(times(w2, g1), g1, times(b2, s[1]));
        if constexpr (AMSGRAD) s[2] = larger(s[2], s[1]);
        T den = plus(over(root(s[STATES - 1]), bc2s), eps);
        p = frame.descend(p, over(times(step, s[0]), den));
    }
};

typedef Adam<float, false> Plain;
typedef Adam<double, false> PlainLong;
KERNELS(adam, Plain, PlainLong)
KERNELS_BF16_STATE(adam, Plain)

typedef Adam<float, true> Largest;
typedef Adam<double, true> LargestLong;
KERNELS(amsgrad, Largest, LargestLong)
KERNELS_BF16_STATE(amsgrad, Largest)
