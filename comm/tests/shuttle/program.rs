//! Random programs that all ranks run, and their faults.

use crate::DEADLINE;
use meshstep_comm::{Action, Faults, Op, Reduction};
use meshstep_tensor::DType;

#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((x ^ (x >> 31)) % n as u64) as usize
    }
}

/// One step of the program that all ranks run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    All(Op),
    Pair { from: usize, to: usize },
    Split,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Trouble {
    /// Calls another operation instead.
    Wrong(Op, usize, DType),
    Return,
    Panic,
    Abort,
    DropOp,
    TooLate,
    LateButInTime,
}

/// Step, rank and kind of each fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) rank: usize,
    pub(crate) step: usize,
    pub(crate) trouble: Trouble,
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) ranks: usize,
    pub(crate) steps: Vec<Step>,
    pub(crate) faults: Vec<Fault>,
}

impl Step {
    pub(crate) fn needs(self, rank: usize) -> bool {
        match self {
            Step::Pair { from, to } => rank == from || rank == to,
            _ => true,
        }
    }

    pub(crate) fn is_collective(self) -> bool {
        !matches!(self, Step::Pair { .. })
    }

    pub(crate) fn op(self, rank: usize) -> Op {
        match self {
            Step::All(op) => op,
            Step::Pair { from, to } if rank == from => Op::send(to),
            Step::Pair { from, .. } => Op::recv(from),
            Step::Split => Op::barrier(),
        }
    }
}

impl Program {
    pub(crate) fn random(random: &mut Random) -> Self {
        let ranks = 2 + random.below(3);
        let steps: Vec<Step> = (0..1 + random.below(6)).map(|_| step(random, ranks)).collect();
        let count = [0, 1, 1, 1, 1, 1, 1, 2, 2, 2][random.below(10)];
        let mut program = Program { ranks, steps, faults: Vec::new() };
        for _ in 0..count {
            if let Some(fault) = program.fault(random) {
                program.faults.push(fault);
            }
        }
        program
    }

    pub(crate) fn fault(&self, random: &mut Random) -> Option<Fault> {
        let (rank, step) = (random.below(self.ranks), random.below(self.steps.len()));
        let trouble = match random.below(10) {
            0..=3 => wrong(random, self.steps[step], rank, self.ranks)?,
            4 => Trouble::Return,
            5 => Trouble::Panic,
            6 => Trouble::Abort,
            7 => Trouble::DropOp,
            8 => Trouble::TooLate,
            _ => Trouble::LateButInTime,
        };
        let on_the_way = matches!(trouble, Trouble::DropOp | Trouble::TooLate | Trouble::LateButInTime);
        // Two ranks with faults at one step might agree with each other.
        let taken = self.faults.iter().any(|fault| fault.rank == rank || fault.step == step);
        let sensible = !taken && (!on_the_way || self.steps[step].needs(rank));
        sensible.then_some(Fault { rank, step, trouble })
    }

    /// Returns the faults that the backend itself injects, by the number of the rank's operation.
    pub(crate) fn injected(&self) -> Faults {
        self.faults.iter().fold(Faults::none(), |faults, &Fault { rank, step, trouble }| {
            let number = self.steps[..step].iter().filter(|step| step.needs(rank)).count() as u64;
            match trouble {
                Trouble::DropOp => faults.drop_op(rank, number),
                Trouble::TooLate => faults.delay(rank, number, DEADLINE * 5 / 2),
                Trouble::LateButInTime => faults.delay(rank, number, DEADLINE / 3),
                _ => faults,
            }
        })
    }

    /// Returns true if a rank is late or missing without having left, so that only the clock can end the wait.
    pub(crate) fn takes_time(&self) -> bool {
        let slow = |fault: &Fault| {
            matches!(fault.trouble, Trouble::DropOp | Trouble::TooLate | Trouble::LateButInTime)
        };
        self.faults.iter().any(slow)
    }

    pub(crate) fn trouble(&self, rank: usize, step: usize) -> Option<Trouble> {
        self.faults.iter().find(|fault| (fault.rank, fault.step) == (rank, step)).map(|fault| fault.trouble)
    }
}

pub(crate) fn step(random: &mut Random, ranks: usize) -> Step {
    let from = random.below(ranks);
    match random.below(10) {
        9 => Step::All(Op::of(Action::ReduceAndGather(Reduction::Sum))),
        0 | 1 => Step::All(Op::all_reduce(Reduction::Sum)),
        2 => Step::All(Op::reduce_scatter(Reduction::Mean)),
        3 => Step::All(Op::all_gather()),
        4 => Step::All(Op::all_to_all()),
        5 => Step::All(Op::broadcast(from)),
        6 => Step::Split,
        _ => Step::Pair { from, to: (from + 1 + random.below(ranks - 1)) % ranks },
    }
}

/// Returns a call that contradicts the other ranks' collective.
pub(crate) fn wrong(random: &mut Random, right: Step, rank: usize, ranks: usize) -> Option<Trouble> {
    let (len, other) = (len(ranks), (rank + 1) % ranks);
    let Step::All(op) = right else { return None };
    Some(match random.below(6) {
        0 => Trouble::Wrong(Op::barrier(), len, DType::F32),
        1 => Trouble::Wrong(op, 2 * len, DType::F32),
        2 => Trouble::Wrong(op, len, DType::F64),
        3 => Trouble::Wrong(Op::send(other), len, DType::F32),
        4 => Trouble::Wrong(Op::recv(other), len, DType::F32),
        _ => Trouble::Wrong(Op::all_reduce(Reduction::Max), len, DType::F32),
    })
}

pub(crate) fn len(ranks: usize) -> usize {
    3 * ranks
}
