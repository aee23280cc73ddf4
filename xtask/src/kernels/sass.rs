//! Counts the instructions that a thread executes per element, in machine code as printed by nvdisasm.
//!
//! Kernels that stream memory run one main loop. The shortest turn of this loop that passes the 16-byte loads is the path
//! of a whole tile, without the code for segment edges and for numbers of very different magnitude. The count measures
//! issue slots, not waiting time.

use anyhow::{Context, ensure};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::process::{Command, Stdio};

/// Instructions that generate random bits write shared memory; stores at most this far apart count as one group.
const TOGETHER: usize = 40;

/// Instructions of a kernel.
type Code = Vec<Instruction>;

/// Reconvergence point of each barrier register.
type Meetings = BTreeMap<String, usize>;

/// Part of a path: the reconvergence points at its end, its length, and its number of wide loads.
type Path_ = (Meetings, u32, u32);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Instruction {
    flow: Flow,
    /// True if the instruction may be skipped: it is predicated, or a branch with a condition operand.
    predicated: bool,
    /// A load of 16 bytes from global memory.
    wide_load: bool,
    shared_store: bool,
}

/// Control flow after an instruction.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Flow {
    On,
    To(usize),
    /// Continue with the next instruction; sets the barrier register's reconvergence point.
    Arm(String, usize),
    Meet(String),
    End,
}

/// Returns the instructions of the shortest turn of each kernel of a cubin. Kernels without wide loads in a loop are
/// omitted.
///
/// `draws` returns true for the kernels that also generate random bits in a turn.
pub(crate) fn turns(
    nvdisasm: &Path,
    cubin: &Path,
    draws: impl Fn(&str) -> bool,
) -> anyhow::Result<BTreeMap<String, u32>> {
    let output = Command::new(nvdisasm)
        .arg("--print-code")
        .arg(cubin)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start {}", nvdisasm.display()))?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "nvdisasm cannot read {}: {problem}", cubin.display());
    let mut turns = BTreeMap::new();
    for (kernel, code) in parse(&String::from_utf8_lossy(&output.stdout))? {
        if let Some(instructions) = shortest_turn(&code, draws(&kernel)) {
            turns.insert(kernel, instructions);
        }
    }
    Ok(turns)
}

/// Parses the code of every kernel.
fn parse(text: &str) -> anyhow::Result<Vec<(String, Code)>> {
    let mut kernels: Vec<(String, Vec<&str>, HashMap<&str, usize>)> = Vec::new();
    let mut inside = false;
    for line in text.lines() {
        if let Some(name) = line.strip_prefix(".text.") {
            kernels.push((name.trim_end_matches(':').to_owned(), Vec::new(), HashMap::new()));
            inside = true;
        } else if line.trim_start().starts_with(".section") {
            inside = false;
        } else if let Some((_, lines, labels)) = kernels.last_mut().filter(|_| inside) {
            if let Some(label) = line.strip_suffix(':').filter(|label| label.starts_with(".L_")) {
                labels.insert(label, lines.len());
            } else if let Some((_, code)) = line.split_once("*/") {
                lines.push(code.trim().trim_end_matches(';').trim());
            }
        }
    }
    let code = |(name, lines, labels): (String, Vec<&str>, HashMap<&str, usize>)| {
        let code = lines.iter().map(|line| instruction(line, &labels)).collect::<anyhow::Result<Code>>();
        code.map(|code| (name, code))
    };
    kernels.into_iter().map(code).collect()
}

/// Parses one instruction, such as `@!P0 BRA `(.L_x_7)`.
fn instruction(line: &str, labels: &HashMap<&str, usize>) -> anyhow::Result<Instruction> {
    let (predicate, rest) = match line.strip_prefix('@') {
        Some(guarded) => {
            guarded.split_once(' ').with_context(|| format!("predicate without an instruction: {line}"))?
        }
        None => ("", line),
    };
    let mut words = rest.split([' ', ',']).filter(|word| !word.is_empty());
    let name = words.next().unwrap_or_default();
    let operation = name.split('.').next().unwrap_or_default();
    let target = || -> anyhow::Result<usize> {
        let label = line.split_once("`(").and_then(|(_, rest)| rest.split(')').next());
        let label = label.with_context(|| format!("no label in: {line}"))?;
        labels.get(label).copied().with_context(|| format!("unknown label in: {line}"))
    };
    let register = words.next().unwrap_or_default().to_owned();
    let flow = match operation {
        "BRA" => Flow::To(target()?),
        "BSSY" => Flow::Arm(register.clone(), target()?),
        "BSYNC" => Flow::Meet(register.clone()),
        "EXIT" | "RET" => Flow::End,
        _ => Flow::On,
    };
    // A branch may have its condition as an operand.
    let conditional = operation == "BRA" && !register.starts_with('`');
    Ok(Instruction {
        flow,
        predicated: !predicate.is_empty() || conditional,
        wide_load: name.starts_with("LDG") && name.contains(".128"),
        shared_store: operation == "STS",
    })
}

/// Returns the length of the shortest cycle through a wide load. Among the cycles of all wide loads, the one that passes
/// the most wide loads wins.
fn shortest_turn(code: &Code, draws: bool) -> Option<u32> {
    let loads = code.iter().enumerate().filter(|(_, instruction)| instruction.wide_load);
    let turn = |(load, _): (usize, &Instruction)| {
        let mut stops = vec![load];
        if draws {
            stops.extend(stores(code));
        }
        stops.push(load);
        let mut all = (Meetings::new(), 0, 0);
        for pair in stops.windows(2) {
            let (meetings, length, wide) = fewest(code, pair[0], pair[1], all.0)?;
            all = (meetings, all.1 + length, all.2 + wide);
        }
        Some((all.1, all.2))
    };
    loads
        .filter_map(turn)
        .min_by_key(|&(length, wide)| (std::cmp::Reverse(wide), length))
        .map(|(length, _)| length)
}

/// Returns the first store of each group.
fn stores(code: &Code) -> Vec<usize> {
    let mut stores: Vec<usize> = Vec::new();
    for (i, _) in code.iter().enumerate().filter(|(_, instruction)| instruction.shared_store) {
        if stores.last().is_none_or(|&last| i > last + TOGETHER) {
            stores.push(i);
        }
    }
    stores
}

/// Returns the shortest path between two instructions; each instruction has length one.
fn fewest(code: &Code, from: usize, to: usize, meetings: Meetings) -> Option<Path_> {
    let start = (from, meetings);
    let mut seen = HashMap::from([(start.clone(), (1, u32::from(code[from].wide_load)))]);
    let mut queue = VecDeque::from([start]);
    while let Some(at) = queue.pop_front() {
        let (length, wide) = seen[&at];
        for next in next(code, &at) {
            if next.0 == to {
                return Some((next.1, length, wide));
            }
            let Some(instruction) = code.get(next.0) else { continue };
            if !seen.contains_key(&next) {
                seen.insert(next.clone(), (length + 1, wide + u32::from(instruction.wide_load)));
                queue.push_back(next);
            }
        }
    }
    None
}

/// Returns the possible states of a thread after one instruction.
fn next(code: &Code, (at, meetings): &(usize, Meetings)) -> Vec<(usize, Meetings)> {
    let Instruction { flow, predicated, .. } = &code[*at];
    let on = (at + 1, meetings.clone());
    let there = match flow {
        Flow::On => return vec![on],
        Flow::Arm(register, place) => {
            let mut meetings = meetings.clone();
            meetings.insert(register.clone(), *place);
            return vec![(at + 1, meetings)];
        }
        Flow::To(place) => Some(*place),
        Flow::Meet(register) => meetings.get(register).copied().or_else(|| armed(code, *at, register)),
        Flow::End => None,
    };
    let there = there.map(|place| (place, meetings.clone()));
    there.into_iter().chain(predicated.then_some(on)).collect()
}

/// Returns the reconvergence point that the last `BSSY` of this register before an instruction sets.
fn armed(code: &Code, before: usize, register: &str) -> Option<usize> {
    code[..before].iter().rev().find_map(|instruction| match &instruction.flow {
        Flow::Arm(name, place) if name == register => Some(*place),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
	.section	.text.loop,\"ax\",@progbits
.text.loop:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   BSSY B0, `(.L_x_2) ;
        /*0020*/                   ISETP.GE.U32.AND P0, PT, R0, 0x2, PT ;
        /*0030*/              @!P0 BRA `(.L_x_3) ;
        /*0040*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0050*/                   BRA `(.L_x_4) ;
.L_x_3:
        /*0060*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0070*/                   FADD R4, R4, R4 ;
        /*0080*/                   FADD R5, R5, R5 ;
.L_x_4:
        /*0090*/                   BSYNC B0 ;
.L_x_2:
        /*00a0*/               @P1 BRA `(.L_x_1) ;
        /*00b0*/                   EXIT ;
	.section	.text.once,\"ax\",@progbits
.text.once:
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   EXIT ;
";

    #[test]
    fn a_turn_is_the_shortest_way_round_through_the_wide_loads() {
        let kernels = parse(TEXT).unwrap();
        let turns: Vec<_> =
            kernels.iter().map(|(name, code)| (&name[..], shortest_turn(code, false))).collect();
        // LDG, two FADD, BSYNC, BRA, BSSY, ISETP, BRA.
        assert_eq!(turns, [("loop", Some(8)), ("once", None)]);
    }

    #[test]
    fn loads_of_shared_memory_do_not_count() {
        let shared = TEXT.replace("LDG.E.128 R4, desc[UR4][R2.64]", "LDS.128 R4, [R2]");
        assert_eq!(shortest_turn(&parse(&shared).unwrap()[0].1, false), None);
    }

    #[test]
    fn a_turn_that_draws_goes_through_every_group_of_stores() {
        let far = "        /*0090*/                   NOP ;\n".repeat(TOGETHER + 1);
        let store = "        /*0090*/                   STS [R0], R1 ;\n";
        let text = TEXT.replacen(
            "                   FADD R4, R4, R4",
            &format!("              @P2 BRA `(.L_x_4) ;\n{store}{store}{far}{store}/**/"),
            1,
        );
        let code = &parse(&text).unwrap()[0].1;
        assert_eq!(stores(code).len(), 2);
        assert_eq!(shortest_turn(code, false), Some(7));
        let all = 8 + TOGETHER as u32 + 1 + 4;
        assert_eq!(shortest_turn(code, true), Some(all));
    }

    #[test]
    fn unknown_labels_are_an_error() {
        assert!(parse(&TEXT.replace("`(.L_x_3)", "`(.L_x_9)")).is_err());
    }
}
