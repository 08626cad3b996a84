//! Converts settings that are single words. Command-line flags and settings files use the same words.

use std::{fmt, str::FromStr};

use clap::ValueEnum;
use serde::{Deserializer, de};

use crate::{
    http::{ListenAddr, token::TokenFile},
    log::LogFormat,
};

/// Returns the word for a variant of an enum, as used in flags and settings files.
pub fn name(choice: &impl ValueEnum) -> String {
    choice.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// A serde visitor for a flag's value in a settings file: a string, or a number that is read as a string.
struct FlagWord;

impl de::Visitor<'_> for FlagWord {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a number")
    }

    fn visit_str<E: de::Error>(self, word: &str) -> Result<String, E> {
        Ok(word.to_owned())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<String, E> {
        Ok(number.to_string())
    }
}

/// Deserializes a value by parsing a string with `FromStr`.
pub fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(FlagWord)?.parse().map_err(de::Error::custom)
}

/// Deserializes a variant of an enum from the word that flags and settings files use for it.
pub fn chosen<'de, D: Deserializer<'de>, T: ValueEnum>(deserializer: D) -> Result<T, D::Error> {
    let word = deserializer.deserialize_any(FlagWord)?;
    T::from_str(&word, false).map_err(|_| {
        let known: Vec<_> = T::value_variants().iter().map(name).collect();
        de::Error::custom(format!("`{word}` is none of {}", known.join(", ")))
    })
}

/// Implements `Deserialize` for the given types, by calling the function [`parsed`] or [`chosen`].
#[macro_export]
macro_rules! deserialize {
    ($by:ident: $($type:ty),*) => {
        $(impl<'de> serde::Deserialize<'de> for $type {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                $crate::words::$by(deserializer)
            }
        })*
    };
}
pub use crate::deserialize;

deserialize!(parsed: ListenAddr, TokenFile);
deserialize!(chosen: LogFormat);
