//! Random schedules: a program of collectives, the way of its bytes, and the faults. A seed determines all of it.

use super::program::{self, Call, Step};
use meshstep_cases::hash;
use std::time::Duration;

/// Deadline of ranks that no fault may end.
pub(super) const PATIENT: Duration = Duration::from_secs(20);

/// Random numbers of a seed.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64, u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Dice(seed, 0)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.1 += 1;
        hash(&[self.0, self.1])
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 8) as usize % bound
    }

    fn millis(&mut self, from: usize, to: usize) -> Duration {
        Duration::from_millis((from + self.below(to - from)) as u64)
    }
}

/// Way of the bytes between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Sockets,
    Sealed,
    Memory,
    /// Even ranks share memory, odd ones too, and both exchange sealed records.
    Mixed,
}

/// One fault.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    Wire(WireFault),
    Frames(FrameFault),
    Rank(RankFault),
    /// Connections without the token, to the store and to every rank.
    Strangers {
        each: usize,
    },
}

/// Fault of one direction of the connections between two ranks, after a number of bytes, those of the handshake among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct WireFault {
    /// The caller, and the rank above it.
    pub(super) pair: (usize, usize),
    /// Number of the pair's connection: the world's, or a group's.
    pub(super) connection: usize,
    pub(super) from_caller: bool,
    pub(super) at: usize,
    pub(super) kind: WireKind,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum WireKind {
    Flip(u8),
    Drop(usize),
    Repeat(usize),
    Garbage(usize),
    /// Both directions end.
    Cut,
    /// Both directions end by a reset.
    Reset,
    /// This direction ends.
    HalfClose,
    /// The rest of this direction is lost, and nobody learns it.
    Swallow,
    /// Both directions stand still.
    Freeze,
    /// The rest comes later.
    Delay(Duration),
    /// The rest comes byte by byte.
    Trickle,
}

/// Fault of what one rank writes, after a number of bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct FrameFault {
    pub(super) rank: usize,
    pub(super) at: usize,
    pub(super) kind: FrameKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// Bytes that are no frame, between two frames.
    Garbage(u64),
    /// The rank closes its streams within a write.
    Close,
    /// The rest of the writes is lost.
    Mute,
    /// The rest comes later.
    Stall(Duration),
}

/// Fault of a rank before a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankFault {
    pub(super) rank: usize,
    pub(super) step: usize,
    pub(super) kind: RankKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RankKind {
    /// Sleeps past the deadline.
    Sleep,
    Leave,
    Panic,
    Abort,
    CallAnother,
    /// Process schedules: the process ends by SIGKILL.
    Kill,
    /// Process schedules: the process ends by SIGKILL while it joins, or soon after.
    KillEarly,
    /// Process schedules: the process is stopped past the deadline.
    Stop,
}

/// Schedule of one seed.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pub(super) seed: u64,
    pub(super) n: usize,
    pub(super) way: Way,
    pub(super) deadline: Duration,
    pub(super) steps: Vec<Step>,
    pub(super) faults: Vec<Fault>,
}

/// Returns true if the ranks of a seed are processes: one in twenty.
pub(super) fn has_processes(seed: u64) -> bool {
    hash(&[seed, 77]).is_multiple_of(20)
}

impl Schedule {
    /// Returns the schedule of a seed.
    pub(super) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let n = 2 + dice.below(3);
        let processes = has_processes(seed);
        let way = match dice.below(if processes { 6 } else { 8 }) {
            0 | 1 => Way::Sockets,
            2 | 3 => Way::Sealed,
            4 | 5 => Way::Memory,
            _ => Way::Mixed,
        };
        let (deadline, steps) = (dice.millis(300, 1000), program::draw(&mut dice));
        let mut schedule = Schedule { seed, n, way, deadline, steps, faults: Vec::new() };
        let count = if processes || dice.below(4) > 0 { 1 } else { 2 };
        for _ in 0..count {
            let fault = if processes { schedule.signal(&mut dice) } else { schedule.fault(&mut dice) };
            schedule.faults.push(fault);
        }
        if schedule.is_harmless() {
            schedule.deadline = PATIENT;
        }
        schedule
    }

    fn signal(&self, dice: &mut Dice) -> Fault {
        let kinds = [RankKind::Kill, RankKind::Kill, RankKind::KillEarly, RankKind::Stop, RankKind::Stop];
        let kind = kinds[dice.below(5)];
        Fault::Rank(RankFault { rank: dice.below(self.n), step: dice.below(self.steps.len()), kind })
    }

    fn fault(&self, dice: &mut Dice) -> Fault {
        let wires = self.way != Way::Memory;
        match dice.below(20) {
            0..12 if wires => Fault::Wire(self.wire(dice)),
            0..14 => Fault::Frames(self.frames(dice)),
            14 if wires => Fault::Strangers { each: 1 + dice.below(30) },
            _ => {
                let kinds = [
                    RankKind::Sleep,
                    RankKind::Leave,
                    RankKind::Panic,
                    RankKind::Abort,
                    RankKind::CallAnother,
                ];
                let (rank, step) = (dice.below(self.n), dice.below(self.steps.len()));
                let mut kind = kinds[dice.below(5)];
                // A rank that takes no part in a pair's operation would only call the next one early.
                if kind == RankKind::CallAnother && matches!(self.steps[step].call, Call::Pair(..)) {
                    kind = RankKind::Abort;
                }
                Fault::Rank(RankFault { rank, step, kind })
            }
        }
    }

    fn wire(&self, dice: &mut Dice) -> WireFault {
        let to = 1 + dice.below(self.n - 1);
        let len = 1 + dice.below(3000);
        let kind = match dice.below(13) {
            0 | 1 => WireKind::Flip((len % 8) as u8),
            2 => WireKind::Drop(len),
            3 => WireKind::Repeat(len),
            4 | 5 => WireKind::Garbage(len),
            6 => WireKind::Cut,
            7 => WireKind::Reset,
            8 => WireKind::HalfClose,
            9 => WireKind::Swallow,
            10 => WireKind::Freeze,
            11 => WireKind::Delay(dice.millis(1, 100)),
            _ => WireKind::Trickle,
        };
        let (connection, from_caller) = (dice.below(5) / 4, dice.below(2) == 0);
        WireFault { pair: (dice.below(to), to), connection, from_caller, at: at(dice), kind }
    }

    fn frames(&self, dice: &mut Dice) -> FrameFault {
        let kind = match dice.below(6) {
            0 | 1 => FrameKind::Garbage(dice.next()),
            2 => FrameKind::Close,
            3 | 4 => FrameKind::Mute,
            _ => FrameKind::Stall(dice.millis(1, 100)),
        };
        FrameFault { rank: dice.below(self.n), at: at(dice), kind }
    }

    /// True if no rank may notice the faults.
    pub(super) fn is_harmless(&self) -> bool {
        self.faults.iter().all(|fault| match fault {
            Fault::Wire(WireFault { kind, .. }) => matches!(kind, WireKind::Delay(_)),
            Fault::Frames(FrameFault { kind, .. }) => matches!(kind, FrameKind::Stall(_)),
            Fault::Strangers { .. } => true,
            Fault::Rank(_) => false,
        })
    }

    /// Returns the faults of a rank.
    pub(super) fn of_rank(&self, rank: usize) -> impl Iterator<Item = &RankFault> {
        self.faults.iter().filter_map(move |fault| match fault {
            Fault::Rank(fault) if fault.rank == rank => Some(fault),
            _ => None,
        })
    }

    /// Returns what a rank writes wrongly.
    pub(super) fn frames_of(&self, rank: usize) -> Option<FrameFault> {
        self.faults.iter().find_map(|fault| match fault {
            Fault::Frames(fault) if fault.rank == rank => Some(*fault),
            _ => None,
        })
    }

    /// Returns the faults of the connections.
    pub(super) fn wires(&self) -> Vec<WireFault> {
        let wire = |fault: &Fault| match fault {
            Fault::Wire(fault) => Some(*fault),
            _ => None,
        };
        self.faults.iter().filter_map(wire).collect()
    }

    /// Returns the number of strangers at each listener.
    pub(super) fn strangers(&self) -> usize {
        let each = |fault: &Fault| if let Fault::Strangers { each } = fault { *each } else { 0 };
        self.faults.iter().map(each).sum()
    }

    /// Returns the name of each fault, for the table of a run.
    pub(super) fn names(&self) -> Vec<String> {
        let name = |text: String| text.split(['(', ' ']).next().unwrap_or_default().to_owned();
        let of = |fault: &Fault| match fault {
            Fault::Wire(fault) => format!("wire {}", name(format!("{:?}", fault.kind))),
            Fault::Frames(fault) => format!("frames {}", name(format!("{:?}", fault.kind))),
            Fault::Rank(fault) => format!("rank {:?}", fault.kind),
            Fault::Strangers { .. } => "strangers".to_owned(),
        };
        self.faults.iter().map(of).collect()
    }
}

/// Byte of a fault: in the handshake, in the first frames, or anywhere.
fn at(dice: &mut Dice) -> usize {
    let range = [300, 5000, 100_000, 1_000_000][dice.below(4)];
    dice.below(range)
}
