//! Exchange of a step: all ranks reduce two small vectors, in one operation, and derive the same decision from them.

use crate::config::digest::digest;
use crate::config::fault::Fault;
use crate::config::options::{Missing, Options};
use crate::config::param_groups::RuleGroup;
use crate::config::preemption::Preemption;
use crate::error::Error;
use crate::plan::step_plan::{FIELDS, MAX_HEAD, SUM_HEAD, SUM_TAIL};
use crate::ranks::agree;
use crate::ranks::host_words::all_reduce_both;
use crate::step::gpu::LentWords;
use crate::update::params::Params;
use meshstep_comm::Communicator;
use meshstep_optim::{ExactSum, NormAccumulator};
use meshstep_tensor::{Buffer, Category, DType, Queue};

/// The two vectors of the exchange, parts of one buffer, kept from step to step.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(super) queue: Queue,
    /// Summed words: non-finite count, weight, the norm's words; two parameters a word if presence counts; two buckets a word if
    /// buckets can be deferred; the balance of weights.
    pub(super) sum: Words,
    /// Maximised words: bits of the largest gradient, fault or preemption, digest, its complement; then one fault per parameter if all ranks
    /// must have the same gradients.
    pub(super) max: Words,
    /// Use of the vectors by another stream.
    pub(super) lent: LentWords,
}

/// Words on the host, and the buffer in which they travel.
#[derive(Debug)]
pub(super) struct Words {
    host: Vec<u64>,
    pub(super) gpu: Buffer,
}

/// Contribution of one rank.
#[derive(Debug)]
pub(crate) struct Brought<'a> {
    pub(crate) norm: &'a NormAccumulator,
    pub(crate) weight: u64,
    pub(crate) balance: u64,
    pub(crate) fault: u64,
    pub(crate) fields: [u64; FIELDS.len()],
}

/// Result of the exchange, the same on every rank.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) norm: NormAccumulator,
    pub(crate) weight: u64,
    pub(crate) fault: u64,
    pub(crate) same: bool,
    /// True if ranks with the same micro-batches gave them the same weights.
    pub(crate) balanced: bool,
}

impl Exchange {
    /// Allocates vectors of these lengths.
    pub(crate) fn new([sums, maxima]: [usize; 2], options: &Options) -> Result<Self, Error> {
        let Options { queue, meter, .. } = options;
        let mut sum = Buffer::zeroed_on(queue, sums + maxima, DType::U64, meter, Category::Staging)?;
        let max = sum.split_off(sums)?;
        let words = |gpu: Buffer| Words { host: vec![0; gpu.len()], gpu };
        let (sum, max) = (words(sum), words(max));
        Ok(Exchange { queue: queue.clone(), sum, max, lent: LentWords::default() })
    }

    /// Lends a buffer in which words can travel between steps.
    pub(crate) fn room(&mut self) -> &mut Buffer {
        &mut self.max.gpu
    }

    /// Runs another exchange in the same vectors, with no more words than a step's.
    pub(crate) fn borrow(
        &mut self,
        comm: &dyn Communicator,
        sums: &mut [u64],
        maxima: &mut [u64],
    ) -> Result<(), meshstep_comm::Error> {
        self.sum.host[..sums.len()].copy_from_slice(sums);
        self.max.host[..maxima.len()].copy_from_slice(maxima);
        self.travel(comm)?;
        sums.copy_from_slice(&self.sum.host[..sums.len()]);
        maxima.copy_from_slice(&self.max.host[..maxima.len()]);
        Ok(())
    }

    /// Reduces the words over all ranks: sums and maxima.
    fn travel(&mut self, comm: &dyn Communicator) -> Result<(), meshstep_comm::Error> {
        self.lent.take_back(&self.queue)?;
        let Exchange { queue, sum, max, .. } = self;
        for Words { host, gpu } in [&mut *sum, &mut *max] {
            queue.upload((&host[..]).into(), gpu.as_mut())?;
        }
        all_reduce_both(comm, [queue; 2], &mut sum.gpu, &mut max.gpu)?;
        for Words { host, gpu } in [sum, max] {
            queue.download(gpu.as_slice(), (&mut host[..]).into())?;
        }
        comm.sound()
    }

    /// Records for each parameter, in registration order, whether this rank has its gradient.
    pub(crate) fn present(&mut self, rank: usize, present: impl Iterator<Item = bool>) {
        let counts = &mut self.sum.host[SUM_HEAD + ExactSum::WORDS..];
        let mut lacking = self.max.host[MAX_HEAD..].iter_mut();
        counts.fill(0);
        for (i, here) in present.enumerate() {
            counts[i / 2] |= u64::from(here) << (i % 2 * 32);
            if let Some(fault) = lacking.next() {
                *fault = if here { 0 } else { encode_fault(&FaultCode::Missing(i), rank) };
            }
        }
    }

    /// Returns how many ranks had parameter `i`'s gradient, after the exchange.
    pub(crate) fn present_on(&self, i: usize) -> usize {
        let word = self.sum.host[SUM_HEAD + ExactSum::WORDS + i / 2];
        (word >> (i % 2 * 32)) as u32 as usize
    }

    /// Records for each bucket whether this rank lacked one of its gradients.
    pub(crate) fn lacked(&mut self, lacked: impl ExactSizeIterator<Item = bool>) {
        let first = self.first_of_buckets(lacked.len());
        self.sum.host[first..first + lacked.len().div_ceil(2)].fill(0);
        for (b, lacked) in lacked.enumerate() {
            self.sum.host[first + b / 2] |= u64::from(lacked) << (b % 2 * 32);
        }
    }

    /// Returns true if some rank lacked a gradient of bucket `b`, after the exchange over `buckets` buckets.
    pub(crate) fn lacked_somewhere(&self, b: usize, buckets: usize) -> bool {
        let word = self.sum.host[self.first_of_buckets(buckets) + b / 2];
        (word >> (b % 2 * 32)) as u32 > 0
    }

    /// Returns the index of the first word of the buckets.
    fn first_of_buckets(&self, buckets: usize) -> usize {
        self.sum.host.len() - SUM_TAIL - buckets.div_ceil(2)
    }

    /// Checks under [`Missing::AllOrNone`], after the exchange, that all ranks or none have each parameter's gradient; the error
    /// is the same on every rank.
    pub(crate) fn check_presence(&self, params: &Params, ranks: usize) -> Result<(), Error> {
        if params.options.missing != Missing::AllOrNone {
            return Ok(());
        }
        let uneven = (0..params.entries.len()).find(|&param| ![0, ranks].contains(&self.present_on(param)));
        uneven.map_or(Ok(()), |param| {
            let (rank, fault) = decode_fault(self.max.host[MAX_HEAD + param], |p| params.name(p));
            Err(Error::Fault { rank, fault })
        })
    }

    /// Contributes this rank's words and returns the result over all ranks.
    pub(crate) fn run(&mut self, comm: &dyn Communicator, mine: Brought<'_>) -> Result<Known, Error> {
        let _span = tracing::debug_span!("exchange").entered();
        let sum = &mut self.sum.host;
        sum[0] = mine.norm.non_finite();
        sum[1] = mine.weight;
        let last = sum.len() - 1;
        sum[last] = mine.balance;
        sum[SUM_HEAD..SUM_HEAD + ExactSum::WORDS].copy_from_slice(&mine.norm.sum().words());
        let digest = mine.fields.iter().fold(0, |d, &f| digest(d, f, 0));
        self.max.host[..MAX_HEAD].copy_from_slice(&[mine.norm.max_bits(), mine.fault, digest, !digest]);
        self.travel(comm)?;
        let (sum, max) = (&self.sum.host, &self.max.host);
        let exact = ExactSum::from_words(&sum[SUM_HEAD..SUM_HEAD + ExactSum::WORDS]);
        let norm = NormAccumulator::from_parts(mine.norm.norm(), exact, max[0], sum[0]);
        let (same, balanced) = (max[2] == !max[3], sum[last] == 0);
        Ok(Known { norm, weight: sum[1], fault: max[1], same, balanced })
    }
}

/// Finds the field that differs, and a rank where it does, after a disagreement. Collective.
pub(crate) fn disagreement(
    comm: &dyn Communicator,
    options: &Options,
    fields: &[u64; FIELDS.len()],
    groups: &[RuleGroup],
) -> Result<Error, Error> {
    let (mut text, mut lines) = (String::new(), FIELDS.iter().zip(fields).map(line));
    text.extend(lines.by_ref().take(FIELDS.len() - 1));
    // List the hyperparameters before the digest of all of them.
    groups.iter().enumerate().for_each(|(g, group)| group.describe(g, &mut text));
    text.extend(lines);
    match agree::same_everywhere(comm, options, &text) {
        Err(error) => Ok(error),
        Ok(()) => Err(Error::Disagree {
            what: "a digest".into(),
            rank0: text.clone(),
            rank: comm.rank(),
            theirs: text,
        }),
    }
}

fn line((name, &value): (&&str, &u64)) -> String {
    format!("{name} = {}\n", shown(name, value))
}

/// Formats a field's value.
pub(crate) fn shown(field: &str, value: u64) -> String {
    match field {
        "lr" | "max_norm" | "grad_scale" | "loss_scale" => f64::from_bits(value).to_string(),
        _ => value.to_string(),
    }
}

/// Packs a fault into one word: a graver fault is larger, and among equal faults the lowest rank is largest.
pub(crate) fn encode_fault(fault: &FaultCode, rank: usize) -> u64 {
    let (code, param) = match *fault {
        FaultCode::Missing(param) => (1, param as u64),
        FaultCode::Lr => (2, 0),
        FaultCode::MaxNorm => (3, 0),
        FaultCode::GradScale => (4, 0),
        FaultCode::NoMicroBatch => (5, 0),
        FaultCode::Unfinished => (6, 0),
        FaultCode::Schedule => (7, 0),
    };
    code << 56 | (0xff_ffff - (rank as u64 & 0xff_ffff)) << 32 | (param & 0xffff_ffff)
}

/// Word of a rank that has no fault and a request to end the run: every fault is larger.
const PREEMPTED: u64 = 1;

/// Returns the word of a rank's fault; without one, of its request to end the run. After a fault the request travels with the next
/// step, because a failed step has no outcome.
pub(crate) fn fault_word(fault: Option<FaultCode>, rank: usize, preemption: &Preemption) -> u64 {
    fault.map_or(u64::from(preemption.is_requested()) * PREEMPTED, |fault| encode_fault(&fault, rank))
}

/// Returns true if the word of all ranks is a fault.
pub(crate) fn is_fault(word: u64) -> bool {
    word >> 56 != 0
}

/// Returns true if no rank has a fault and some rank has a request to end the run.
pub(crate) fn is_preempted(word: u64) -> bool {
    word == PREEMPTED
}

/// Returns the rank and the fault of a word with a fault.
pub(crate) fn decode_fault(word: u64, name: impl Fn(usize) -> String) -> (usize, Fault) {
    let rank = 0xff_ffff - (word >> 32 & 0xff_ffff) as usize;
    let fault = match word >> 56 {
        1 => Fault::MissingGradient { name: name((word & 0xffff_ffff) as usize) },
        2 => Fault::Lr,
        3 => Fault::MaxNorm,
        4 => Fault::GradScale,
        5 => Fault::NoMicroBatch,
        7 => Fault::Schedule,
        _ => Fault::Unfinished,
    };
    (rank, fault)
}

/// A [`Fault`] by parameter index instead of name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultCode {
    Missing(usize),
    Lr,
    MaxNorm,
    GradScale,
    NoMicroBatch,
    Unfinished,
    Schedule,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_survive_the_wire_and_the_lowest_rank_wins() {
        let name = |i: usize| format!("p{i}");
        let word = encode_fault(&FaultCode::Missing(70_000), 1234);
        assert_eq!(decode_fault(word, name), (1234, Fault::MissingGradient { name: "p70000".into() }));
        assert!(encode_fault(&FaultCode::Lr, 2) > encode_fault(&FaultCode::Lr, 3));
        assert!(encode_fault(&FaultCode::Unfinished, 9) > word);
    }

    #[test]
    fn a_preemption_is_no_fault_and_every_fault_outweighs_it() {
        let (none, asked) = (Preemption::new(), Preemption::new());
        asked.request();
        assert_eq!(fault_word(None, 5, &none), 0);
        let word = fault_word(None, 5, &asked);
        assert!(is_preempted(word) && !is_fault(word) && word > 0);
        // The mildest fault, of the highest rank.
        let fault = fault_word(Some(FaultCode::Missing(0)), 0xff_ffff, &asked);
        assert!(fault > word && is_fault(fault) && !is_preempted(fault));
    }
}
