//! Result of clipping a rank's own gradients before they are combined with other ranks'.

/// Result of clipping before the reduction, on this rank.
///
/// ```
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::LocalClip;
///
/// loopback::spawn(1, |comm| -> Result<(), meshstep_shard::Error> {
///     let layout = Layout::builder().param("w", &[2], DType::F32).build()?;
///     let options = Options { clip: Clip::BeforeReduce, initial: Initial::Compare, ..Options::default() };
///     let mut opt = Optimizer::new(comm, layout, Sgd::default(), |_, _| Ok(()), options)?;
///     let mb = opt.micro_batch(1)?;
///     mb.grad("w", &[3f32, 4.0])?;
///     mb.finish()?;
///     opt.step(StepArgs { lr: 1.0, max_norm: Some(1.0), ..StepArgs::default() })?.outcome()?;
///     let Some(LocalClip { norm, coef }) = opt.local_clip() else { panic!("this rank has clipped") };
///     assert!(norm == 5.0 && (coef - 0.2).abs() < 1e-6);
///     Ok(())
/// })?.into_iter().collect::<Result<(), _>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalClip {
    /// Norm of this rank's own gradients over all its micro-batches, unscaled; of the finite elements if some are not finite.
    pub norm: f64,
    /// Factor on the gradients; 1 if their norm was within the bound, or if some are not finite.
    pub coef: f64,
}
