//! Manifests of any length that take as much memory for their text as their shape allows.

use std::fmt::Write as _;

/// Manifest without its hash, and its shape.
#[derive(Clone, Debug)]
pub struct Greedy {
    /// Shape of the manifest.
    pub shape: &'static str,
    /// Text without the hash.
    pub body: String,
    /// Part of the error; `None` for a valid manifest.
    pub refused: Option<&'static str>,
}

const MIB: u64 = 1 << 20;

/// Returns a manifest with these members.
fn body(files: &str, tensors: &str, settings: &str, blobs: &str) -> String {
    format!(
        r#"{{"format":1,"step":1,"mesh":"","files":[{files}],"tensors":{{{tensors}}},"settings":{{{settings}}},"blobs":{{{blobs}}}"#
    )
}

/// Returns parts from 0 on, separated by commas, with `len` bytes or a few more.
fn list(len: usize, part: impl Fn(&mut String, u64)) -> String {
    let mut all = String::with_capacity(len + (1 << 10));
    for i in 0.. {
        part(&mut all, i);
        if all.len() >= len {
            break;
        }
        all.push(',');
    }
    all
}

/// The only file, which is large enough for everything.
fn file() -> String {
    format!(r#"{{"name":"a","bytes":{},"blake3":""}}"#, u64::MAX)
}

/// Writes a piece of `bytes` bytes from `at` on, with its hashes.
fn piece(to: &mut String, place: &str, key: &str, at: u64, bytes: u64) {
    let hashes = vec![r#""0123456789abcdef""#; bytes.div_ceil(MIB) as usize].join(",");
    write!(
        to,
        r#"{{{place},"key":"{key}","stored":{{"file":0,"at":{at},"bytes":{bytes},"xxh3":[{hashes}]}}}}"#
    )
    .unwrap();
}

/// Returns `len` bytes of a large model: three vectors of one piece each in every tensor, with one to three hashes.
pub fn tensors(len: usize) -> String {
    let tensors = list(len, |to, i| {
        let elements = 64 + i % 3 * (MIB / 4);
        write!(to, r#""model.layers.{i}.mlp.weight":{{"shape":[{elements}],"t":1000,"slots":{{"#).unwrap();
        for (n, slot) in (0..).zip(["m", "param", "v"]) {
            let separator = if n > 0 { "," } else { "" };
            write!(to, r#"{separator}"{slot}":{{"dtype":"F32","pieces":["#).unwrap();
            let place = format!(r#""offsets":[0],"extents":[{elements}],"range":[0,{elements}]"#);
            let at = 4 * MIB * (3 * i + n);
            piece(to, &place, &format!("model.layers.{i}.mlp.weight:{slot}"), at, 4 * elements);
            to.push_str("]}");
        }
        to.push_str("}}");
    });
    body(&file(), &tensors, "", "")
}

/// Returns a tensor of one slot with these pieces.
fn one(shape: &str, pieces: &str) -> String {
    let tensors = format!(
        r#""w":{{"shape":[{shape}],"t":0,"slots":{{"param":{{"dtype":"F32","pieces":[{pieces}]}}}}}}"#
    );
    body(&file(), &tensors, "", "")
}

/// Returns pieces of one element; `place` says where the element of a number lies.
fn pieces(len: usize, place: impl Fn(u64) -> String) -> (u64, String) {
    let count = std::cell::Cell::new(0);
    let pieces = list(len, |to, i| {
        count.set(i + 1);
        piece(to, &place(i), "", 4 * i, 4);
    });
    (count.get(), pieces)
}

/// Returns pieces that are a range each of one box.
fn ranges(len: usize) -> String {
    let (count, _) = pieces(len, |i| format!(r#""offsets":[0],"extents":[9999999],"range":[{i},{}]"#, i + 1));
    let place = |i| format!(r#""offsets":[0],"extents":[{count}],"range":[{i},{}]"#, i + 1);
    let (again, pieces) = pieces(len - len / 50, place);
    one(&again.to_string(), &pieces.replace(&format!("[{count}]"), &format!("[{again}]")))
}

/// Returns pieces that are a box each, in `dims` dimensions.
fn boxes(len: usize, dims: usize) -> String {
    let more = |number: &str| format!(",{number}").repeat(dims - 1);
    let place = |i| format!(r#""offsets":[{i}{}],"extents":[1{}],"range":[0,1]"#, more("0"), more("1"));
    let (count, pieces) = pieces(len, place);
    one(&format!("{count}{}", more("1")), &pieces)
}

/// Returns manifests of about `len` bytes each.
pub fn all(len: usize) -> Vec<Greedy> {
    let valid = |shape, body| Greedy { shape, body, refused: None };
    let invalid = |shape, body, refused| Greedy { shape, body, refused: Some(refused) };
    let repeat = |len: usize, text: &str| list(len, |to, _| to.push_str(text));
    let number = |len: usize, text: &str| list(len, |to, i| write!(to, "\"{i:x}\":{text}").unwrap());
    let (repeated, numbered) = (|text: &str| repeat(len, text), |text: &str| number(len, text));
    // Fewer values are within the limits.
    let many = len.max(4 << 20);
    let settings = |value: String| body("", "", &format!("\"x\":{value}"), "");
    let tensor = |text: String| body("", &text, "", "");
    let long = "n".repeat(len);
    let hashes = {
        let count = (len / 19) as u64;
        let (elements, mut text) = (count * MIB / 4, String::new());
        let place = format!(r#""offsets":[0],"extents":[{elements}],"range":[0,{elements}]"#);
        piece(&mut text, &place, "", 0, count * MIB);
        one(&elements.to_string(), &text)
    };
    let piece = r#"{"offsets":[],"extents":[],"range":[0,0],"key":"","stored":{"file":0,"at":0,"bytes":0,"xxh3":[]}}"#;
    let stored = r#"{"file":0,"at":0,"bytes":0,"xxh3":[]}"#;
    let placed = |lists: &str| {
        let rest =
            r#""range":[0,1],"key":"","stored":{"file":0,"at":0,"bytes":4,"xxh3":["0123456789abcdef"]}"#;
        one("1", &format!("{{{lists},{rest}}}"))
    };
    vec![
        valid("tensors with vectors", tensors(len)),
        valid("ranges of one box", ranges(len)),
        valid("boxes", boxes(len, 1)),
        valid("boxes of 64 dimensions", boxes(len, 64)),
        valid("tensors alone", tensor(numbered(r#"{"shape":[],"t":0,"slots":{}}"#))),
        valid("hashes of one piece", hashes),
        valid("blobs", body(&file(), "", "", &numbered(stored))),
        valid(
            "files",
            body(
                &list(len, |to, i| write!(to, r#"{{"name":"{i:x}","bytes":0,"blake3":""}}"#).unwrap()),
                "",
                "",
                "",
            ),
        ),
        valid(
            "slots",
            tensor(format!(
                r#""w":{{"shape":[0],"t":0,"slots":{{{}}}}}"#,
                numbered(r#"{"dtype":"F32","pieces":[]}"#)
            )),
        ),
        valid(
            "long names",
            tensor(list(len, |to, i| {
                write!(to, r#""{i:x}{}":{{"shape":[],"t":0,"slots":{{}}}}"#, &long[..4000]).unwrap();
            })),
        ),
        invalid("empty pieces", one("", &repeated(piece)), "ranges ascend"),
        invalid(
            "dimensions",
            tensor(format!(r#""w":{{"shape":[{}],"t":0,"slots":{{}}}}"#, repeated("1"))),
            "64 are the most",
        ),
        invalid(
            "offsets",
            placed(&format!(r#""offsets":[{}],"extents":[]"#, repeated("0"))),
            "64 are the most",
        ),
        invalid(
            "a name",
            tensor(format!(r#""{long}":{{"shape":[],"t":0,"slots":{{}}}}"#)),
            "65536 are the most",
        ),
        invalid(
            "a key",
            placed(r#""offsets":[0],"extents":[1]"#).replace(r#""key":"""#, &format!(r#""key":"{long}""#)),
            "65536 are the most",
        ),
        invalid(
            "a mesh",
            body("", "", "", "").replace(r#""mesh":"""#, &format!(r#""mesh":"{long}""#)),
            "65536 are the most",
        ),
        invalid("a member", body("", "", "", "") + &format!(r#","{long}":0"#), "65536 are the most"),
        invalid(
            "a text for a number",
            body("", "", "", "").replace(r#""step":1"#, &format!(r#""step":"{long}""#)),
            "65536 are the most",
        ),
        invalid(
            "a long name",
            tensor(format!(r#""{}":{{"shape":[],"t":0,"slots":{{}}}}"#, &long[..5000])),
            "4096 are the most",
        ),
        invalid("short names", tensor(repeated(r#""":0"#)), "more memory than a manifest's"),
        invalid("short escaped names", tensor(repeated(r#""\n":0"#)), "more memory than a manifest's"),
        invalid("names twice", tensor(repeated(r#""a":{"shape":[],"t":0,"slots":{}}"#)), "is there twice"),
        invalid("numbers in settings", settings(format!("[{}]", repeat(many, "0"))), "bytes as"),
        invalid("objects in settings", settings(format!("[{}]", repeat(many, r#"{"":0}"#))), "bytes as"),
        invalid("members in settings", settings(format!("{{{}}}", number(many, "0"))), "bytes as"),
        invalid("lists in settings", settings("[".repeat(len)), "recursion limit"),
    ]
}
