//! Checks of the table against a release of NCCL: assertions about its header are compiled, and its library is loaded.
//!
//! `cargo xtask ci --only nccl-abi` fetches releases and names the folder of one, with `include` and `lib`, in MESHSTEP_NCCL_ABI.
//! The tests need no GPU.

use super::{Ability, IN_PROGRESS, NO_COLOR, NcclConfig, NcclWindow, RawId, SUCCESS, SYMMETRIC, Table};
use crate::nccl::UniqueId;
use crate::nccl::issue::{self, FROM_HOST};
use crate::{Error, Reduction};
use meshstep_tensor::DType;
use std::any::type_name;
use std::fmt::Write as _;
use std::fs;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the folder of the release.
fn release() -> Option<PathBuf> {
    let folder = std::env::var_os("MESHSTEP_NCCL_ABI").map(PathBuf::from);
    if folder.is_none() {
        println!("skipped: MESHSTEP_NCCL_ABI names no release of NCCL");
    }
    folder
}

/// Returns the kind of a type as `KIND` below names it: pointer, number or struct, and its size in bytes.
pub(super) fn kind<T>() -> String {
    let name = type_name::<T>();
    let letter = match name {
        pointer if pointer.starts_with('*') => 'p',
        "i32" | "u32" | "usize" => 'n',
        _ => 's',
    };
    format!("{letter}{}", size_of::<T>())
}

/// Parts of CUDA's headers that NCCL's header uses.
const CUDA: [(&str, &str); 3] = [
    (
        "cuda_runtime.h",
        "#pragma once\n#include <stddef.h>\n#include <stdint.h>\n#define CUDART_VERSION 11000\n\
         typedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n",
    ),
    ("cuda_fp16.h", ""),
    ("cuda_bf16.h", "#define __CUDA_BF16_TYPES_EXIST__\n"),
];

/// C++ code that reads a function's type and names each part as [`kind`] does.
const KIND: &str = r#"
#include <cstddef>
#include <initializer_list>
#include <nccl.h>
#include <string_view>
#include <type_traits>

struct Kind {
    char letter;
    size_t size;
    constexpr bool is(std::string_view name) const {
        size_t number = 0;
        for (char digit : name.substr(1)) number = number * 10 + size_t(digit - '0');
        return name[0] == letter && number == size;
    }
};

template <class T> constexpr Kind kind() {
    bool number = std::is_enum_v<T> || std::is_integral_v<T>;
    return {std::is_pointer_v<T> ? 'p' : number ? 'n' : 's', sizeof(T)};
}

template <class R, class... A> constexpr bool is(R (*)(A...), std::initializer_list<std::string_view> names) {
    Kind own[] = {kind<R>(), kind<A>()...};
    if (names.size() != 1 + sizeof...(A)) return false;
    for (size_t i = 0; i < names.size(); ++i)
        if (!own[i].is(names.begin()[i])) return false;
    return true;
}

constexpr ncclConfig_t initial = NCCL_CONFIG_INITIALIZER;
"#;

/// Returns C++ expressions with the values that comm assumes.
fn claims(version: i32) -> Vec<(String, i64)> {
    let config = NcclConfig::not_blocking();
    let mut claims = fields();
    let mut claim = |text: &str, value: i64| claims.push((text.to_owned(), value));
    claim("NCCL_VERSION_CODE", version.into());
    claim("initial.magic", config.magic.into());
    for unset in ["cgaClusterSize", "minCTAs", "maxCTAs"] {
        claim(&format!("initial.{unset}"), config.cluster_size.into());
    }
    claim("initial.netName == nullptr", config.net_name.is_null().into());
    claim(&format!("NCCL_VERSION_CODE >= {}", config.version), 1);
    claim("sizeof(ncclUniqueId)", size_of::<RawId>() as i64);
    claim("ncclSuccess", SUCCESS.into());
    claim("ncclInProgress", IN_PROGRESS.into());
    claim("NCCL_SPLIT_NOCOLOR", NO_COLOR.into());
    claim("ncclScalarHostImmediate", FROM_HOST.into());
    if version >= 22_700 {
        claim("NCCL_WIN_COLL_SYMMETRIC", SYMMETRIC.into());
        claim("sizeof(ncclWindow_t)", size_of::<NcclWindow>() as i64);
    }
    claims.extend(numbers());
    claims
}

/// Returns the offsets of the config's fields; the next field begins where comm's config ends.
fn fields() -> Vec<(String, i64)> {
    let fields = [
        ("size", offset_of!(NcclConfig, size)),
        ("magic", offset_of!(NcclConfig, magic)),
        ("version", offset_of!(NcclConfig, version)),
        ("blocking", offset_of!(NcclConfig, blocking)),
        ("cgaClusterSize", offset_of!(NcclConfig, cluster_size)),
        ("minCTAs", offset_of!(NcclConfig, min_blocks)),
        ("maxCTAs", offset_of!(NcclConfig, max_blocks)),
        ("netName", offset_of!(NcclConfig, net_name)),
        ("splitShare", size_of::<NcclConfig>()),
    ];
    fields.map(|(field, at)| (format!("offsetof(ncclConfig_t, {field})"), at as i64)).into()
}

/// Returns the numbers of types and reductions.
fn numbers() -> Vec<(String, i64)> {
    let types = [
        ("ncclUint64", DType::U64),
        ("ncclFloat16", DType::F16),
        ("ncclFloat32", DType::F32),
        ("ncclFloat64", DType::F64),
        ("ncclBfloat16", DType::BF16),
    ];
    let reductions = [
        ("ncclSum", Reduction::Sum),
        ("ncclAvg", Reduction::Mean),
        ("ncclMax", Reduction::Max),
        ("ncclMin", Reduction::Min),
    ];
    let types = types.map(|(name, dtype)| (name.to_owned(), issue::number(dtype).unwrap().into()));
    let reductions = reductions.map(|(name, how)| (name.to_owned(), issue::reduction(how).into()));
    types.into_iter().chain(reductions).collect()
}

/// Returns C++ code that compiles only if every claim and every function's type matches the header, and names each mismatch.
fn text(claims: &[(String, i64)], signatures: &[(&str, Vec<String>)]) -> String {
    let mut text = KIND.to_owned();
    let mut expect = |test: String, told: String| {
        writeln!(text, "static_assert({test}, \"comm expects {told}\");").unwrap()
    };
    for (claim, value) in claims {
        expect(format!("({claim}) == {value}"), format!("{value}: {claim}"));
    }
    for (function, kinds) in signatures {
        let names = format!("{{\"{}\"}}", kinds.join("\", \""));
        expect(format!("is({function}, {names})"), format!("{}: {function}", kinds.join(" ")));
    }
    text
}

/// Returns the compiler's errors for the code with this release's header.
fn objections(folder: &Path, text: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    for (name, header) in CUDA {
        fs::write(dir.path().join(name), header).unwrap();
    }
    let source = dir.path().join("claims.cpp");
    fs::write(&source, text).unwrap();
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++17", "-fsyntax-only", "-fmax-errors=0", "-I"]).arg(dir.path());
    let output = compiler.arg("-I").arg(folder.join("include")).arg(source).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.success(), said.is_empty(), "{said}");
    said
}

#[test]
fn the_header_says_what_the_table_says() {
    let Some(folder) = release() else { return };
    let version = Table::get().unwrap().found.version;
    let said = objections(&folder, &text(&claims(version), &Table::signatures(version)));
    assert!(said.is_empty(), "{}:\n{said}", folder.display());
}

#[test]
fn a_wrong_number_and_a_wrong_type_are_named() {
    let Some(folder) = release() else { return };
    let version = Table::get().unwrap().found.version;
    let (mut claims, mut signatures) = (claims(version), Table::signatures(version));
    claims.iter_mut().for_each(|(_, value)| *value += 2);
    // No function has such an argument or result.
    signatures.iter_mut().filter_map(|(_, kinds)| kinds.last_mut()).for_each(|kind| *kind = "s16".to_owned());
    let said = objections(&folder, &text(&claims, &signatures));
    let unnamed = |told: &String| !said.contains(&format!("comm expects {told}\n"));
    let told = claims.iter().map(|(claim, value)| format!("{value}: {claim}"));
    let functions = signatures.iter().map(|(name, kinds)| format!("{}: {name}", kinds.join(" ")));
    let unnamed: Vec<String> = told.chain(functions).filter(unnamed).collect();
    assert!(unnamed.is_empty(), "{unnamed:?} in\n{said}");
}

#[test]
fn the_library_has_every_function_and_makes_ids() {
    if release().is_none() {
        return;
    }
    let table = Table::get().unwrap();
    assert!(!table.found.stand_in, "the release's lib folder comes first in LD_LIBRARY_PATH");
    let version = table.found.version;
    assert_eq!(table.lacking(), Table::later(version), "NCCL {version} has what the table says");
    for (ability, since) in [
        (Ability::NonBlocking, 21_400),
        (Ability::Split, 21_800),
        (Ability::Factors, 21_100),
        (Ability::Registration, 21_900),
        (Ability::Windows, 22_700),
        (Ability::Shrink, 22_700),
        (Ability::Revoke, 22_809),
        (Ability::Grow, 22_900),
    ] {
        assert_eq!(
            table.found.abilities.contains(&ability),
            version >= since,
            "{ability:?} of NCCL {version}"
        );
    }
    let ids = [(); 2].map(|()| UniqueId::new().unwrap());
    assert_ne!(ids[0], ids[1]);
    let invalid = table.told("ncclSend", 4, std::ptr::null_mut());
    let Err(Error::Nccl { code: 4, name, .. }) = invalid else { panic!("{invalid:?}") };
    assert!(name.starts_with("invalid argument"), "{name}");
    assert_eq!(table.told("ncclSend", IN_PROGRESS, std::ptr::null_mut()), Ok(false));
}
