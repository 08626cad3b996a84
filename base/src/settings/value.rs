//! Deserializes TOML values with serde. Errors name the key, and the type that its value should have.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use serde::de::{
    self, DeserializeSeed, Deserializer, Error as _, IntoDeserializer as _, MapAccess, SeqAccess, Visitor,
    value::StrDeserializer,
};
use toml::{
    Spanned,
    de::{DeArray, DeTable, DeValue},
};

use super::place::{SettingPlace, inner, line, unknown};

/// A fault of one value.
#[derive(Debug)]
pub(super) struct Fault {
    /// Line and keys of the faulty value: the position of the innermost key or list item that contains it.
    pub place: Option<SettingPlace>,
    /// The required key that is missing in the table.
    pub missing: Option<&'static str>,
    pub message: String,
}

impl std::error::Error for Fault {}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        let message = match message.to_string().as_str() {
            "invalid IP address syntax" => "is an address, such as \"192.0.2.1\" or \"2001:db8::1\"",
            "invalid socket address syntax" => {
                "is an address and a port, such as \"192.0.2.1:4443\" or \"[2001:db8::1]:4443\""
            }
            other => return Self { place: None, missing: None, message: other.to_owned() },
        };
        Self { place: None, missing: None, message: message.to_owned() }
    }

    fn invalid_type(_: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::custom(format_args!("is {wanted}"))
    }

    fn invalid_value(_: de::Unexpected<'_>, wanted: &dyn de::Expected) -> Self {
        Self::custom(format_args!("is {wanted}"))
    }

    fn unknown_variant(word: &str, known: &'static [&'static str]) -> Self {
        Self::custom(format_args!("is {}, not {word:?}", choice(known)))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::custom(unknown(field, known))
    }

    fn missing_field(field: &'static str) -> Self {
        Self { missing: Some(field), ..Self::custom("is missing") }
    }
}

/// Joins words as `"a", "b" or "c"`.
fn choice(words: &[&str]) -> String {
    let quoted: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => "nothing".to_owned(),
    }
}

/// Describes a value's type, for error messages.
pub(super) fn kind(value: &DeValue<'_>) -> String {
    format!("a value of type {}", value.type_str())
}

pub(super) struct ValueContext<'c> {
    /// Byte offsets of the line breaks.
    pub breaks: &'c [usize],
    /// Keys whose values an earlier deserialization of the same file found faulty. This deserialization skips them.
    pub wrong: &'c BTreeSet<String>,
    pub lines: &'c RefCell<BTreeMap<String, usize>>,
}

/// A TOML value, and the key that it has in its table.
#[derive(Clone, Copy)]
pub(super) struct ValueNode<'c, 'v> {
    pub context: &'c ValueContext<'c>,
    pub value: &'v DeValue<'v>,
    pub key: &'v str,
}

impl ValueNode<'_, '_> {
    fn expected<T>(self, what: &str) -> Result<T, Fault> {
        Err(Fault::custom(format_args!("is {what}, not {}", kind(self.value))))
    }

    fn integer(self, min: i64, max: i64) -> Result<i64, Fault> {
        let number = self.value.as_integer().and_then(|it| i64::from_str_radix(it.as_str(), it.radix()).ok());
        let number = number.filter(|number| (min..=max).contains(number));
        number.ok_or_else(|| Fault::custom(format_args!("is a number, {min} to {max}")))
    }

    fn text(&self) -> Result<&str, Fault> {
        self.value.as_str().map_or_else(|| self.expected("text in quotes"), Ok)
    }
}

/// An iterator over keys or list items. It skips keys and items whose values were already found faulty.
struct Items<'c, 'v, I> {
    of: ValueNode<'c, 'v>,
    items: I,
    /// The value that belongs to the key that the iterator has returned last.
    value: Option<(SettingPlace, &'v DeValue<'v>)>,
}

impl<'c, 'v, I> Items<'c, 'v, I> {
    fn new(of: ValueNode<'c, 'v>, items: I) -> Self {
        Self { of, items, value: None }
    }

    /// Records the line of a key or list item. Returns `None` if the key or item is skipped, because its value was
    /// already found faulty.
    fn enter(&self, key: String, span: std::ops::Range<usize>) -> Option<SettingPlace> {
        let line = line(self.of.context.breaks, span);
        let place = (!self.of.context.wrong.contains(&key)).then(|| SettingPlace { line, key: key.clone() });
        self.of.context.lines.borrow_mut().insert(key, line);
        place
    }

    fn read<S: DeserializeSeed<'static>>(
        &self,
        seed: S,
        place: &SettingPlace,
        value: &DeValue<'_>,
    ) -> Result<S::Value, Fault> {
        let node = ValueNode { context: self.of.context, value, key: &place.key };
        seed.deserialize(node).map_err(|fault| Fault { place: fault.place.or(Some(place.clone())), ..fault })
    }
}

impl<'v, I> MapAccess<'static> for Items<'_, 'v, I>
where
    I: Iterator<Item = (&'v Spanned<std::borrow::Cow<'v, str>>, &'v Spanned<DeValue<'v>>)>,
{
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'static>>(&mut self, seed: K) -> Result<Option<K::Value>, Fault> {
        while let Some((key, value)) = self.items.next() {
            let Some(place) = self.enter(inner(self.of.key, key.get_ref()), key.span()) else { continue };
            let name: StrDeserializer<'_, Fault> = key.get_ref().as_ref().into_deserializer();
            let read = seed.deserialize(name);
            let read = read.map_err(|fault| Fault { place: Some(place.clone()), ..fault });
            self.value = Some((place, value.get_ref()));
            return read.map(Some);
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'static>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        match self.value.take() {
            Some((place, value)) => self.read(seed, &place, value),
            None => Err(Fault::custom("has no value")),
        }
    }
}

impl<'v, I: Iterator<Item = (usize, &'v Spanned<DeValue<'v>>)>> SeqAccess<'static> for Items<'_, 'v, I> {
    type Error = Fault;

    fn next_element_seed<S: DeserializeSeed<'static>>(&mut self, seed: S) -> Result<Option<S::Value>, Fault> {
        while let Some((at, item)) = self.items.next() {
            let Some(place) = self.enter(format!("{}[{at}]", self.of.key), item.span()) else { continue };
            return self.read(seed, &place, item.get_ref()).map(Some);
        }
        Ok(None)
    }
}

/// A single value that is read as a list of one item.
struct SoleItem<'c, 'v>(Option<ValueNode<'c, 'v>>);

impl SeqAccess<'static> for SoleItem<'_, '_> {
    type Error = Fault;

    fn next_element_seed<S: DeserializeSeed<'static>>(&mut self, seed: S) -> Result<Option<S::Value>, Fault> {
        self.0.take().map(|node| seed.deserialize(node)).transpose()
    }
}

fn items<'v>(array: &'v DeArray<'v>) -> impl Iterator<Item = (usize, &'v Spanned<DeValue<'v>>)> {
    array.iter().enumerate()
}

fn entries<'v>(
    table: &'v DeTable<'v>,
) -> impl Iterator<Item = (&'v Spanned<std::borrow::Cow<'v, str>>, &'v Spanned<DeValue<'v>>)> {
    table.iter()
}

macro_rules! integers {
    ($($method:ident, $min:expr, $max:expr;)*) => {
        $(fn $method<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
            visitor.visit_i64(self.integer($min, $max)?)
        })*
    };
}

impl Deserializer<'static> for ValueNode<'_, '_> {
    type Error = Fault;

    integers! {
        deserialize_u8, 0, u8::MAX.into();
        deserialize_u16, 0, u16::MAX.into();
        deserialize_u32, 0, u32::MAX.into();
        deserialize_u64, 0, i64::MAX;
        deserialize_i8, i8::MIN.into(), i8::MAX.into();
        deserialize_i16, i16::MIN.into(), i16::MAX.into();
        deserialize_i32, i32::MIN.into(), i32::MAX.into();
        deserialize_i64, i64::MIN, i64::MAX;
    }

    fn deserialize_any<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value {
            DeValue::String(text) => visitor.visit_str(text),
            DeValue::Integer(_) => visitor.visit_i64(self.integer(i64::MIN, i64::MAX)?),
            DeValue::Float(_) => self.deserialize_f64(visitor),
            DeValue::Boolean(it) => visitor.visit_bool(*it),
            DeValue::Datetime(time) => visitor.visit_str(&time.to_string()),
            DeValue::Array(array) => visitor.visit_seq(Items::new(self, items(array))),
            DeValue::Table(table) => visitor.visit_map(Items::new(self, entries(table))),
        }
    }

    fn deserialize_f64<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        let number = match self.value {
            DeValue::Float(float) => float.as_str().parse().ok(),
            _ => self.integer(i64::MIN, i64::MAX).ok().map(|whole| whole as f64),
        };
        number.map_or_else(|| self.expected("a number"), |number| visitor.visit_f64(number))
    }

    fn deserialize_f32<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_bool<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value.as_bool() {
            Some(it) => visitor.visit_bool(it),
            None => Err(Fault::custom("is true or false, without quotes")),
        }
    }

    fn deserialize_str<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_str(self.text()?)
    }

    fn deserialize_string<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_enum<V: Visitor<'static>>(
        self,
        _: &'static str,
        known: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        match self.value.as_str() {
            Some(word) => visitor.visit_enum::<StrDeserializer<'_, Fault>>(word.into_deserializer()),
            None => self.expected(&choice(known)),
        }
    }

    fn deserialize_option<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'static>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value {
            DeValue::Array(_) => self.deserialize_any(visitor),
            DeValue::Table(_) => {
                Err(Fault::custom(format_args!("each is a table of its own, written `[[{}]]`", self.key)))
            }
            _ => visitor.visit_seq(SoleItem(Some(self))),
        }
    }

    fn deserialize_map<V: Visitor<'static>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.value {
            DeValue::Table(_) => self.deserialize_any(visitor),
            _ => self.expected("a table"),
        }
    }

    fn deserialize_struct<V: Visitor<'static>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        self.deserialize_map(visitor)
    }

    serde::forward_to_deserialize_any! {
        <V: Visitor<'static>>
        char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}
