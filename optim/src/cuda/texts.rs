//! Embedded code of the kernels: compressed PTX of each file, and with the feature `cubins` also machine code.
//!
//! A driver compiles PTX for its device, in time that grows with the text. Therefore only the text of one kernel is loaded, on first use.

use miniz_oxide::inflate::decompress_to_vec_with_limit;

/// File compressed by the build.
struct Packed {
    module: &'static str,
    /// Chip of machine code, as 90 for sm_90; 0 for PTX.
    chip: u32,
    bytes: &'static [u8],
    len: usize,
}

static FILES: &[Packed] = &include!(concat!(env!("OUT_DIR"), "/texts.rs"));

/// Code for a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// PTX of one kernel.
    Ptx(String),
    /// Machine code of all kernels of a file.
    Machine(Vec<u8>),
}

/// Returns the machine code of the kernel's file for a device of this compute capability, if embedded, then the kernel's PTX.
pub(crate) fn codes(kernel: &str, capability: (u32, u32)) -> impl Iterator<Item = Code> {
    machine_code(kernel, capability).into_iter().chain(text(kernel))
}

fn of_module(kernel: &str) -> impl Iterator<Item = &'static Packed> {
    let module = super::module(kernel);
    FILES.iter().filter(move |file| file.module == module)
}

fn machine_code(kernel: &str, (major, minor): (u32, u32)) -> Option<Code> {
    let fits = |file: &&Packed| file.chip > 0 && file.chip / 10 == major && file.chip % 10 <= minor;
    let file = of_module(kernel).filter(fits).max_by_key(|file| file.chip)?;
    Some(Code::Machine(file.unpacked()))
}

fn text(kernel: &str) -> Option<Code> {
    let ptx = String::from_utf8(of_module(kernel).find(|file| file.chip == 0)?.unpacked()).ok()?;
    one(&ptx, kernel).map(Code::Ptx)
}

impl Packed {
    fn unpacked(&self) -> Vec<u8> {
        let unpacked = decompress_to_vec_with_limit(self.bytes, self.len).unwrap_or_default();
        assert_eq!(unpacked.len(), self.len, "what the build has packed can be unpacked");
        unpacked
    }
}

/// Returns the PTX of one kernel of a file: the head, the declarations that the kernel names, and the kernel.
fn one(ptx: &str, kernel: &str) -> Option<String> {
    let mut parts = Parts::of(ptx);
    let entry = parts.entries.remove(kernel)?;
    let named = |line: &&str| symbol(line).is_some_and(|symbol| entry.contains(symbol));
    let memory = parts.memory.into_iter().filter(named);
    Some(parts.head.into_iter().chain(memory).map(|line| format!("{line}\n")).collect::<String>() + &entry)
}

/// PTX file, split into parts.
#[derive(Default)]
struct Parts<'a> {
    /// Version, target and address size, with the comments before them.
    head: Vec<&'a str>,
    /// Declarations outside kernels.
    memory: Vec<&'a str>,
    entries: std::collections::HashMap<&'a str, String>,
}

impl<'a> Parts<'a> {
    fn of(ptx: &'a str) -> Self {
        let mut parts = Parts::default();
        let mut kernel = None;
        let mut depth = 0;
        for line in ptx.lines() {
            if let Some(rest) = line.strip_prefix(".visible .entry ") {
                kernel = Some(rest.split('(').next().unwrap_or_default());
            }
            match kernel {
                Some(name) => {
                    let entry = parts.entries.entry(name).or_default();
                    entry.push_str(line);
                    entry.push('\n');
                }
                None if symbol(line).is_some() => parts.memory.push(line),
                None => parts.head.push(line),
            }
            let open = line.matches('{').count();
            depth = (depth + open).saturating_sub(line.matches('}').count());
            if depth == 0 && line == "}" {
                kernel = None;
            }
        }
        parts
    }
}

/// Returns the name of declared memory, as in `.shared .align 8 .b8 words[1064];` or `.global .align 4 .u32 MOST = 3;`.
fn symbol(line: &str) -> Option<&str> {
    let declared = [".shared ", ".global ", ".const "].iter().any(|space| line.starts_with(space));
    let name = declared.then(|| line.split(['[', '=', ';']).next())??;
    name.split_whitespace().last()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "\
// x
.version 7.0
.target sm_80
.address_size 64
.global .align 4 .u32 ONE = 1;
.shared .align 8 .b8 words[16];
.visible .entry x_a(
.param .u64 x_a_param_0
)
{
.shared .align 8 .b8 own[8];
{
mov.u64 %rd1, words;
}
ret;
}
.visible .entry x_b(
)
{
ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [ONE];
}
";

    #[test]
    fn a_kernel_comes_with_the_head_and_the_memory_that_it_names() {
        let a = one(FILE, "x_a").unwrap();
        let without = FILE.replace(".global .align 4 .u32 ONE = 1;\n", "");
        assert_eq!(a, without[..without.find(".visible .entry x_b").unwrap()]);
        let b = one(FILE, "x_b").unwrap();
        assert!(b.contains("ONE = 1") && !b.contains("words") && b.ends_with("[ONE];\n}\n"), "{b}");
        assert_eq!(one(FILE, "x"), None);
    }

    #[test]
    fn every_kernel_of_every_file_is_found_whole() {
        let mut kernels = 0;
        for file in FILES.iter().filter(|file| file.chip == 0) {
            let ptx = String::from_utf8(file.unpacked()).unwrap();
            assert_eq!(ptx.len(), file.len, "{}", file.module);
            let parts = Parts::of(&ptx);
            assert!(parts.head.iter().all(|line| !line.contains(".func")), "{}", file.module);
            for kernel in parts.entries.keys() {
                let Some(Code::Ptx(text)) = super::text(kernel) else { panic!("{kernel}") };
                assert_eq!(text.matches(".entry ").count(), 1, "{kernel}");
                assert_eq!(text.matches('{').count(), text.matches('}').count(), "{kernel}");
                // Every name made by the compiler is declared.
                for name in text
                    .split(|c: char| !c.is_alphanumeric() && c != '_')
                    .filter(|word| word.starts_with("_Z"))
                {
                    assert!(text.lines().any(|line| symbol(line) == Some(name)), "{kernel}: {name}");
                }
                kernels += 1;
            }
            assert_eq!(parts.entries.len(), ptx.matches(".entry ").count(), "{}", file.module);
        }
        assert!(kernels > 100, "{kernels} kernels");
        assert_eq!(codes("unknown_f32", (0, 0)).next(), None);
        assert_eq!(codes("adam_unknown", (0, 0)).next(), None);
    }
}
