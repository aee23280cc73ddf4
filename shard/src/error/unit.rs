//! Errors of units of sharded parameters.

/// Error in the use of a unit, or of a parameter asked of one.
///
/// ```
/// use meshstep_optim::Lbfgs;
/// use meshstep_shard::prelude::*;
/// use meshstep_shard::{AssignmentError, DataRankError, Error, NotForLbfgs, ReadError, UnitError, WeightError};
///
/// loopback::spawn(1, |comm| -> Result<(), Error> {
///     let layout = || Layout::builder().unit("h").param("h.w", &[3], DType::F32).build();
///     let build = |options| Optimizer::new(comm.clone(), layout()?, AdamW::default(), |_, _| Ok(()), options);
///     let mut opt = build(Options { stage: Stage::Zero3, combine: Combine::Weighted, ..Options::default() })?;
///
///     // Sharded parameters are read in their unit.
///     assert!(matches!(opt.param("h.w"), Err(Error::Unit(UnitError::Sharded { unit, .. })) if unit == "h"));
///     assert!(matches!(opt.read("h.w", &mut [0f32; 2]), Err(Error::Read(ReadError::Len { expected: 3, given: 2, .. }))));
///     // The gradient of a micro-batch is multiplied by its weight.
///     let heavy = opt.micro_batch(1 << 60).map(drop);
///     assert!(matches!(heavy, Err(Error::Weights(WeightError::TooLarge { .. }))));
///
///     let nowhere = DataRank { index: 0, ranks: 0, first: true };
///     let refused = Optimizer::empty(comm.clone(), nowhere, Options::default()).map(drop);
///     assert!(matches!(refused, Err(Error::Place(DataRankError::NoRanks { index: 0 }))));
///
///     let lbfgs = ShardedLbfgs::over(build(Options::default())?, Lbfgs::default()).map(drop);
///     assert!(matches!(lbfgs, Err(Error::NotForLbfgs(NotForLbfgs::State { .. }))));
///
///     let groups = [vec![0, 7]];
///     let grouped = CrossShard::new(comm.clone(), Some(&groups), layout()?, Sgd::default(), |_, _| Ok(()), Options::default());
///     assert!(matches!(grouped.map(drop), Err(Error::Assignment(AssignmentError::OutOfRange { rank: 7, .. }))));
///     Ok(())
/// })?.into_iter().collect::<Result<(), Error>>()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnitError {
    /// No unit has this name.
    #[error("no unit {unit:?} among the {count} units; Optimizer::units lists their names")]
    Unknown {
        /// The name asked for.
        unit: String,
        /// Number of units.
        count: usize,
    },
    /// Two units would have this name.
    #[error(
        "{name:?} names a unit, and a parameter before the first unit that would name the unit of its bucket; rename \
         one of them, or begin a unit before the parameter"
    )]
    TwoOfOneName {
        /// The name.
        name: String,
    },
    /// The unit is gathered already.
    #[error("unit {unit:?} is gathered already; drop it before gathering it again")]
    Taken {
        /// The unit.
        unit: String,
    },
    /// The parameter is sharded, so no rank has all of it.
    #[error("parameter {name:?} is sharded; gather its unit {unit:?} and read it there")]
    Sharded {
        /// The parameter.
        name: String,
        /// Its unit.
        unit: String,
    },
    /// The parameter belongs to another unit.
    #[error("parameter {name:?} is in unit {unit:?}, not in {gathered:?}; gather {unit:?}")]
    Elsewhere {
        /// The parameter.
        name: String,
        /// Its unit.
        unit: String,
        /// The unit that was asked.
        gathered: String,
    },
}

meshstep_tensor::debug_is_display!(UnitError);
