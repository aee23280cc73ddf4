//! Collectives by themselves: forward against plain arithmetic, backward against the transpose.

use crate::parallel::common::{Along, Here, Lies, SAME, assert_close, check, numbers, on_mesh, tensor};
use candle_core::{DType, Device, Tensor, Var};
use meshstep_comm::Kind;
use meshstep_tensor::{bf16, f16};

const CUT: fn(usize) -> Lies = |dim| [Along::Cut(dim), Along::Same];

#[test]
fn gathering_and_scattering_are_transposes_along_every_dimension() {
    for ranks in [1, 2, 3, 4] {
        for dim in 0..3 {
            let mut shape = [2, 3, 5];
            shape[dim] *= ranks;
            for dtype in [DType::F32, DType::F64] {
                let x = tensor(&shape, 1, dtype);
                // The gathered whole goes into a different term on every rank.
                let gather = |here: &Here, x: &[Tensor]| {
                    let whole = here.tp.all_gather(&x[0], dim)?;
                    here.tp.reduce_scatter(&(whole * (here.tp.rank() + 1) as f64)?, dim)
                };
                let factor = (ranks * (ranks + 1) / 2) as f64;
                check((ranks, 1), &[(x, CUT(dim))], CUT(dim), gather, |x| &x[0] * factor);
            }
        }
    }
}

#[test]
fn a_copy_used_in_parts_and_added_up_has_the_whole_gradient() {
    for ranks in [1, 2, 4] {
        let x = tensor(&[4, 3], 2, DType::F64);
        let layer = |here: &Here, x: &[Tensor]| {
            let own = (here.tp.copy(&x[0])? * (here.tp.rank() as f64 + 0.5))?;
            here.tp.all_reduce(&own.sqr()?)
        };
        let squares: f64 = (0..ranks).map(|rank| (rank as f64 + 0.5).powi(2)).sum();
        check((ranks, 1), &[(x, SAME)], SAME, layer, |x| x[0].sqr()? * squares);
    }
}

#[test]
fn the_maximum_is_everybodys_and_has_no_gradient() {
    let ranks = on_mesh(4, 1, |here| {
        let own = Var::from_tensor(&tensor(&[3, 2], here.tp.rank() as u64, DType::F32)).unwrap();
        let max = here.tp.max(&own).unwrap();
        let grads = (own.as_tensor() * &max).unwrap().sum_all().unwrap().backward().unwrap();
        assert_close(grads.get(&own).unwrap(), &max, "as of a constant");
        max
    });
    let all = (0..4).map(|rank| tensor(&[3, 2], rank, DType::F32));
    let expected = all.reduce(|a, b| a.maximum(&b).unwrap()).unwrap();
    assert!(ranks.iter().all(|max| numbers(max) == numbers(&expected)));
}

#[test]
fn small_types_travel_as_they_are() {
    let sums = on_mesh(2, 1, |here| {
        let brain = Tensor::new(&[bf16::from_f32(1.5), bf16::ONE], &Device::Cpu).unwrap();
        let half = Tensor::new(&[f16::from_f32(0.25), f16::ONE], &Device::Cpu).unwrap();
        let both = [here.tp.all_reduce(&brain).unwrap(), here.tp.all_gather(&half, 0).unwrap()];
        both.map(|x| (x.dtype(), numbers(&x)))
    });
    let expected = [(DType::BF16, vec![3.0, 2.0]), (DType::F16, vec![0.25, 1.0, 0.25, 1.0])];
    assert_eq!(sums, [expected.clone(), expected]);
}

#[test]
fn what_is_strided_is_exchanged_in_its_own_order() {
    for ranks in [1, 2, 3] {
        let x = tensor(&[6, 4], 5, DType::F64);
        let layer = |here: &Here, x: &[Tensor]| {
            let whole = here.tp.all_gather(&x[0].t()?, 1)?;
            here.tp.all_reduce(&(whole / here.tp.world_size() as f64)?)
        };
        check((ranks, 1), &[(x, CUT(0))], SAME, layer, |x| x[0].t());
    }
}

/// Branches of different lengths that join again: candle visits them in the same order on every rank.
#[test]
fn backward_exchanges_in_one_order_on_every_rank() {
    let counts = on_mesh(4, 1, |here| {
        for round in 0..20 {
            let x = Var::from_tensor(&tensor(&[4, 4], round, DType::F32)).unwrap();
            let w = Var::from_tensor(&tensor(&[8, 4], round + 100, DType::F32)).unwrap();
            // Different lengths, so that loopback can detect mismatched exchanges.
            let left = here.tp.all_gather(&x, 0).unwrap();
            let right = here.tp.copy(&w).unwrap();
            let middle = here.tp.all_gather(&here.tp.copy(&x).unwrap(), 1).unwrap();
            let product = left.matmul(&right.t().unwrap()).unwrap();
            let branches = [product.sum_all(), middle.sqr().unwrap().sum_all(), left.sum_all()];
            let loss = branches.into_iter().map(Result::unwrap).reduce(|a, b| (a + b).unwrap()).unwrap();
            let grads = here.tp.all_reduce(&loss).unwrap().backward().unwrap();
            assert!(grads.get(&x).is_some() && grads.get(&w).is_some());
        }
        let stats = here.tp.comm().stats();
        [Kind::AllGather, Kind::ReduceScatter, Kind::AllReduce].map(|kind| stats.of(kind).operations)
    });
    // Two all-gathers forward; two reduce-scatters and two all-reduces of copies backward; one all-reduce of the loss.
    assert_eq!(counts, [[40, 40, 60]; 4]);
}
