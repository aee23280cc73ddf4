//! Names in texts that ranks compare.

use std::fmt::Write;

/// Appends `name` as its `Debug` form does. Most names need no escapes, and are copied whole: a model may have a million.
pub(crate) fn quote(text: &mut String, name: &str) {
    let plain = |byte: u8| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\';
    if name.bytes().all(plain) {
        text.extend(["\"", name, "\""]);
    } else {
        // Writing to a string cannot fail.
        let _ = write!(text, "{name:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quoted_name_is_its_debug_form() {
        let every = (0..=0x2ff_u32).filter_map(char::from_u32).map(|c| format!("layer.{c}.weight"));
        for name in every.chain([String::new(), "plain name".to_owned()]) {
            let mut text = "before ".to_owned();
            quote(&mut text, &name);
            assert_eq!(text, format!("before {name:?}"));
        }
    }
}
