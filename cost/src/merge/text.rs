//! Adds up stacks while their JSON is parsed. Known functions and stacks cause no allocation.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::{MergeStacks, StackKey};

/// Adds stacks from the JSON text of a `Stacks`. After an error, some of them may have been added.
pub(super) fn add(into: &mut MergeStacks, text: &str) -> Result<(), serde_json::Error> {
    let mut parser = serde_json::Deserializer::from_str(text);
    ReportSeed(into).deserialize(&mut parser)?;
    parser.end()?;
    into.keep_bounded();
    Ok(())
}

/// Implements `DeserializeSeed` for a type that is its own `Visitor`.
macro_rules! seed {
    ($type:ty, $deserialize:ident -> $value:ty) => {
        impl<'de> DeserializeSeed<'de> for $type {
            type Value = $value;

            fn deserialize<D: Deserializer<'de>>(self, parser: D) -> Result<$value, D::Error> {
                parser.$deserialize(self)
            }
        }
    };
}

struct ReportSeed<'a>(&'a mut MergeStacks);
seed!(ReportSeed<'_>, deserialize_map -> ());

impl<'de> Visitor<'de> for ReportSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stacks with their functions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut numbers = None;
        while let Some(name) = map.next_key::<&str>()? {
            match (name, &numbers) {
                ("functions", _) => numbers = Some(map.next_value_seed(FunctionSeed(&mut *self.0))?),
                ("stacks", Some(numbers)) => {
                    map.next_value_seed(StackListSeed { into: &mut *self.0, numbers })?
                }
                ("stacks", None) => return Err(Error::missing_field("functions")),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(())
    }
}

/// Parser of the list of functions. Its result is the number of each function in the sum.
struct FunctionSeed<'a>(&'a mut MergeStacks);
seed!(FunctionSeed<'_>, deserialize_seq -> Vec<u32>);

impl<'de> Visitor<'de> for FunctionSeed<'_> {
    type Value = Vec<u32>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("names of functions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Vec<u32>, A::Error> {
        let mut numbers = Vec::new();
        while let Some(number) = list.next_element_seed(NameSeed(&mut *self.0))? {
            numbers.push(number);
        }
        Ok(numbers)
    }
}

struct NameSeed<'a>(&'a mut MergeStacks);
seed!(NameSeed<'_>, deserialize_str -> u32);

impl Visitor<'_> for NameSeed<'_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a function")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<u32, E> {
        Ok(self.0.number(name))
    }
}

struct StackListSeed<'a> {
    into: &'a mut MergeStacks,
    numbers: &'a [u32],
}
seed!(StackListSeed<'_>, deserialize_seq -> ());

impl<'de> Visitor<'de> for StackListSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stacks")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        // The key's list of functions is reused for each stack, which avoids allocations.
        let mut key = StackKey::default();
        while let Some((samples, ns)) =
            list.next_element_seed(StackSeed { key: &mut key, numbers: self.numbers })?
        {
            self.into.count(&key, samples, ns);
        }
        Ok(())
    }
}

/// Parser of one stack. It fills `key`, and its result is the number of samples and their time in ns.
struct StackSeed<'a> {
    key: &'a mut StackKey,
    numbers: &'a [u32],
}
seed!(StackSeed<'_>, deserialize_map -> (u64, u64));

impl<'de> Visitor<'de> for StackSeed<'_> {
    type Value = (u64, u64);

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a stack")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(u64, u64), A::Error> {
        let mut cpu = None;
        let mut has_frames = false;
        let mut samples = None;
        let mut ns = None;
        (self.key.1, self.key.2) = (None, None);
        while let Some(name) = map.next_key::<&str>()? {
            match name {
                "cpu" => cpu = Some(map.next_value()?),
                "event" => self.key.1 = map.next_value()?,
                "pid" => self.key.2 = map.next_value()?,
                "frames" => {
                    has_frames = true;
                    map.next_value_seed(FrameSeed { into: &mut self.key.3, numbers: self.numbers })?;
                }
                "samples" => samples = Some(map.next_value()?),
                "ns" => ns = Some(map.next_value()?),
                _ => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        self.key.0 = cpu.ok_or_else(|| Error::missing_field("cpu"))?;
        if !has_frames {
            return Err(Error::missing_field("frames"));
        }
        let samples = samples.ok_or_else(|| Error::missing_field("samples"))?;
        Ok((samples, ns.ok_or_else(|| Error::missing_field("ns"))?))
    }
}

struct FrameSeed<'a> {
    into: &'a mut Vec<u32>,
    numbers: &'a [u32],
}
seed!(FrameSeed<'_>, deserialize_seq -> ());

impl<'de> Visitor<'de> for FrameSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("positions of functions")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        self.into.clear();
        while let Some(at) = list.next_element::<u32>()? {
            // A frame without a function can only come from a damaged file.
            self.into.extend(self.numbers.get(at as usize));
        }
        Ok(())
    }
}
