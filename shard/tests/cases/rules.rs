//! Rules of runs, with options that differ from the defaults.

use meshstep_optim::{AdamW, Moments, QhAdamW, ScheduleFreeAdamW};

pub fn adamw() -> AdamW {
    AdamW { weight_decay: 0.1, ..AdamW::default() }
}

pub fn schedule_free() -> ScheduleFreeAdamW {
    ScheduleFreeAdamW { warmup_steps: 2, r: 0.5, weight_decay: 0.1, ..ScheduleFreeAdamW::default() }
}

pub(crate) fn two_moments() -> QhAdamW {
    QhAdamW { moments: Moments::new(&[(0.9, 0.3), (0.99, 0.5)]).unwrap(), ..QhAdamW::default() }
}
