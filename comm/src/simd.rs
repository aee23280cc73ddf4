//! One body compiled several times, for the instructions the machine turns out to have.
//!
//! The compiler may use wider registers, never another rounding: Rust does not contract or reorder floating-point
//! operations, so all versions give the same bits.

/// Work worth compiling for every instruction set. `run` and what it calls are to be `#[inline(always)]`.
pub(crate) trait Kernel {
    fn run(self);
}

/// Runs `kernel` with the widest registers there are.
pub(crate) fn dispatch<K: Kernel>(kernel: K) {
    #[cfg(target_arch = "x86_64")]
    {
        let (f, bw) = (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("avx512bw"));
        let (vl, dq) = (is_x86_feature_detected!("avx512vl"), is_x86_feature_detected!("avx512dq"));
        if f && bw && vl && dq {
            // SAFETY: the machine has just said that it has these four.
            return unsafe { avx512(kernel) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has just said that it has AVX2.
            return unsafe { avx2(kernel) };
        }
    }
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn avx512<K: Kernel>(kernel: K) {
    kernel.run();
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2<K: Kernel>(kernel: K) {
    kernel.run();
}
