//! Converts NVRTC's output into the committed PTX: compact text that old drivers load, with a fingerprint of its source.

use anyhow::ensure;
use std::hash::Hasher as _;
use twox_hash::XxHash3_64;

/// Declared PTX version: the first that knows the oldest supported chip (sm_80), which the drivers of CUDA 11.0 load. ptxas
/// checks that each text needs no newer one.
const VERSION: &str = "7.0";

/// Returns the committed text of a module: two `//` lines with its name and the fingerprint of its source, then the PTX.
pub(crate) fn committed(name: &str, fingerprint: &str, written: &str) -> anyhow::Result<String> {
    let body = lowered(&squeezed(written))?;
    Ok(format!("// {name}\n// of {fingerprint}\n{body}"))
}

/// Returns a hash of the inputs of a module's text: the source, the compiler and the options.
pub(crate) fn fingerprint(parts: &[&str]) -> String {
    let mut hasher = XxHash3_64::new();
    for part in parts {
        hasher.write(&(part.len() as u64).to_le_bytes());
        hasher.write(part.as_bytes());
    }
    format!("{:016x}", hasher.finish())
}

/// Removes comments, empty lines and superfluous whitespace.
fn squeezed(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        let code = line.split("//").next().unwrap_or_default();
        let mut words = code.split_whitespace();
        if let Some(first) = words.next() {
            out.push_str(first);
            words.for_each(|word| {
                out.push(' ');
                out.push_str(word);
            });
            out.push('\n');
        }
    }
    out
}

/// Replaces the compiler's PTX version with [`VERSION`].
fn lowered(text: &str) -> anyhow::Result<String> {
    let is_version = |line: &&str| line.starts_with(".version ");
    let versions = text.lines().filter(is_version).count();
    ensure!(versions == 1, "NVRTC's PTX has {versions} `.version` lines, but exactly one is expected");
    let lines = text
        .lines()
        .map(|line| if is_version(&line) { format!(".version {VERSION}\n") } else { format!("{line}\n") });
    Ok(lines.collect())
}

/// Describes how the committed text differs from the fresh one; returns `None` if they are equal.
pub(crate) fn difference(committed: Option<&str>, fresh: &str) -> Option<String> {
    let Some(committed) = committed else { return Some("is missing".to_owned()) };
    if committed == fresh {
        return None;
    }
    let (found, wanted) = (committed.lines().nth(1), fresh.lines().nth(1));
    if found != wanted {
        return Some("was compiled from other sources, by another compiler or with other options".to_owned());
    }
    let same = committed.lines().zip(fresh.lines()).take_while(|(a, b)| a == b).count();
    Some(format!("differs from the output of its sources from line {} on", same + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRITTEN: &str = "//\n// Generated\n\n.version 9.0\n.target sm_80\n\n\t// .globl\tadam\n.visible .entry adam(\n\t.param \
                           .u64 a\n)\n{\n\t.reg .b32 \t%r<3>;\n\tmov.u32 \t%r1, %r2;  // why\n\tret;\n\n}\n";

    #[test]
    fn keeps_the_code_alone_and_lowers_the_version() {
        let text = committed("adam", "12", WRITTEN).unwrap();
        let expected = "// adam\n// of 12\n.version 7.0\n.target sm_80\n.visible .entry adam(\n.param .u64 a\n)\n{\n\
                        .reg .b32 %r<3>;\nmov.u32 %r1, %r2;\nret;\n}\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_text_without_one_version_is_refused() {
        for text in ["", ".target sm_80\n", ".version 9.0\n.version 9.0\n"] {
            assert!(committed("adam", "12", text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_fingerprint_knows_its_parts_apart() {
        let texts = [["ab", "c"], ["a", "bc"], ["ab", "d"], ["", "abc"]];
        let prints: Vec<String> = texts.iter().map(|parts| fingerprint(parts)).collect();
        for (i, print) in prints.iter().enumerate() {
            assert_eq!(print.len(), 16);
            assert!(!prints[..i].contains(print), "{:?}", texts[i]);
        }
        assert_eq!(prints[0], fingerprint(&["ab", "c"]));
    }

    #[test]
    fn each_difference_is_told_apart() {
        let fresh = "// adam\n// of 12\na\nb\n";
        assert_eq!(difference(Some(fresh), fresh), None);
        assert_eq!(difference(None, fresh).unwrap(), "is missing");
        assert!(difference(Some("// adam\n// of 13\na\nb\n"), fresh).unwrap().contains("other sources"));
        assert!(difference(Some("// adam\n// of 12\na\nc\n"), fresh).unwrap().contains("line 4"));
        assert!(difference(Some("// adam\n// of 12\na\n"), fresh).unwrap().contains("line 4"));
        assert!(difference(Some(""), fresh).unwrap().contains("other sources"));
    }
}
