//! Errors of units of sharded parameters.

/// Error in the use of a unit, or of a parameter asked of one.
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
