//! Issue slots: minimum time that a device needs to issue a row's instructions, from the counts of `optim/kernels.budget`.

use super::Result;
use meshstep_tensor::cuda::Device;

/// Budget of every kernel; the last column has the instructions of a thread's turn.
const BUDGET: &str = include_str!("../../../../optim/kernels.budget");

/// Threads of a multiprocessor that issue an instruction per clock: four schedulers, each for a warp.
const THREADS_A_CLOCK: f64 = 4.0 * 32.0;

/// Kernels of a row, each with the elements of a thread's turn. Empty if no count applies to the row.
pub(crate) type Counted = Vec<(String, u64)>;

/// Returns the instructions of a kernel's turn, or `None` without a count.
fn turn(kernel: &str) -> Option<f64> {
    let row = BUDGET.lines().find(|line| line.split_whitespace().next() == Some(kernel))?;
    row.split_whitespace().last()?.parse().ok()
}

/// Returns the instructions of a thread per element of a row.
fn instructions(kernels: &Counted) -> Option<f64> {
    let each = kernels.iter().map(|(kernel, elements)| Some(turn(kernel)? / *elements as f64));
    each.sum::<Option<f64>>().filter(|&all| all > 0.0)
}

/// Returns the seconds in which the device issues the instructions for `params` elements at its highest clock; `None` if a
/// kernel has no count or the driver reports no clock.
pub(crate) fn issue_seconds(kernels: &Counted, params: usize, device: &Device) -> Result<Option<f64>> {
    Ok(seconds(kernels, params, device.multiprocessors()?, device.clock_rate()?))
}

fn seconds(kernels: &Counted, params: usize, multiprocessors: u32, hertz: u64) -> Option<f64> {
    let a_second = f64::from(multiprocessors) * THREADS_A_CLOCK * hertz as f64;
    instructions(kernels).filter(|_| a_second > 0.0).map(|each| each * params as f64 / a_second)
}

#[cfg(test)]
mod tests {
    use super::*;
    use meshstep_optim::cuda::{THREADS, norm_tile};
    use meshstep_tensor::DType;

    #[test]
    fn instructions_are_those_of_the_budget() {
        let elements = norm_tile(DType::BF16) / u64::from(THREADS);
        let norm = ("norm_l2_bf16".to_owned(), elements);
        let each = instructions(&vec![norm.clone()]).unwrap();
        assert_eq!(each * 32.0, turn("norm_l2_bf16").unwrap());
        let both = vec![norm.clone(), ("adam_f32".to_owned(), 8)];
        assert_eq!(instructions(&both), Some(each + turn("adam_f32").unwrap() / 8.0));
        // A kernel without a count, and an unknown kernel.
        for other in ["norm_write", "norm_l2"] {
            assert_eq!(instructions(&vec![norm.clone(), (other.to_owned(), 1)]), None, "{other}");
        }
        assert_eq!(instructions(&Vec::new()), None);
    }

    #[test]
    fn seconds_are_instructions_over_slots() {
        let adam = vec![("adam_f32".to_owned(), 8)];
        let turn = turn("adam_f32").unwrap();
        // One multiprocessor issues instructions for 128 threads per clock.
        assert_eq!(seconds(&adam, 8 * 128, 1, 1), Some(turn));
        assert_eq!(seconds(&adam, 8 * 128, 2, 10), Some(turn / 20.0));
        assert_eq!(seconds(&adam, 8, 1, 0), None, "no clock");
    }
}
