//! Checks that detect malformed tracks (draft-18, "Malformed Tracks").
//!
//! The checks cover only what a relay parses anyway. A relay skips additional copies of a subgroup that it has, so
//! faults in those copies are not detected.

use crate::{
    DecodeError,
    property::{KeyValuePair, KeyValuePairs, Value},
};

/// The reason why a track is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct TrackMalformed(pub &'static str);

impl From<DecodeError> for TrackMalformed {
    fn from(error: DecodeError) -> Self {
        Self(error.reason)
    }
}

/// The largest and the final object ID of a group, as far as they are known.
#[derive(Clone, Copy, Debug, Default)]
pub struct GroupState {
    largest: Option<u64>,
    /// ID of the group's final object, once it is known.
    last: Option<u64>,
}

impl GroupState {
    /// Records that an object has arrived. `ends` says that it is the group's final object.
    ///
    /// # Errors
    /// Fails if the object is after the final one, or another object is already final.
    pub fn take(&mut self, id: u64, ends: bool) -> Result<(), TrackMalformed> {
        if self.last.is_some_and(|last| id > last) {
            return Err(TrackMalformed("an object after the last of its group"));
        }
        if ends && self.largest.is_some_and(|largest| largest > id) {
            return Err(TrackMalformed("the end of a group before objects that have arrived"));
        }
        self.largest = self.largest.max(Some(id));
        if ends {
            self.last = Some(id);
        }
        Ok(())
    }
}

const IMMUTABLE: u64 = 0x0b;
const PRIOR_GROUP_GAP: u64 = 0x3c;
const PRIOR_OBJECT_GAP: u64 = 0x3e;
/// Property types that only tracks may have, and objects may not.
const MANDATORY: std::ops::RangeInclusive<u64> = 0x4000..=0x7fff;

/// Checks the properties of an object.
///
/// # Errors
/// Fails if objects in general, or this object, cannot have these properties.
pub fn check_properties(block: &[u8], group: u64, object: u64) -> Result<(), TrackMalformed> {
    if block.is_empty() {
        return Ok(());
    }
    let mut seen = SeenProperties { group, object, immutable: false, group_gap: false, object_gap: false };
    KeyValuePairs::new(block).try_for_each(|pair| seen.take(pair?, true))
}

/// The property types that may occur only once in an object, each with whether it has occurred.
struct SeenProperties {
    group: u64,
    object: u64,
    immutable: bool,
    group_gap: bool,
    object_gap: bool,
}

impl SeenProperties {
    fn take(&mut self, pair: KeyValuePair<'_>, outside: bool) -> Result<(), TrackMalformed> {
        match (pair.kind, pair.value) {
            (IMMUTABLE, _) if !outside => Err(TrackMalformed("immutable properties inside immutable ones")),
            (IMMUTABLE, Value::Bytes(block)) => {
                check_once(&mut self.immutable, "immutable properties twice")?;
                KeyValuePairs::new(block).try_for_each(|pair| self.take(pair?, false))
            }
            (PRIOR_GROUP_GAP, Value::Integer(gap)) => {
                check_once(&mut self.group_gap, "a repeated gap of groups")?;
                fits(gap, self.group, "a gap of more groups than precede it")
            }
            (PRIOR_OBJECT_GAP, Value::Integer(gap)) => {
                check_once(&mut self.object_gap, "a repeated gap of objects")?;
                fits(gap, self.object, "a gap of more objects than precede it")
            }
            (kind, _) if MANDATORY.contains(&kind) => {
                Err(TrackMalformed("a mandatory track property on an object"))
            }
            _ => Ok(()),
        }
    }
}

fn check_once(seen: &mut bool, twice: &'static str) -> Result<(), TrackMalformed> {
    if std::mem::replace(seen, true) { Err(TrackMalformed(twice)) } else { Ok(()) }
}

fn fits(gap: u64, id: u64, more: &'static str) -> Result<(), TrackMalformed> {
    if gap > id { Err(TrackMalformed(more)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::property::PairWriter;

    #[test]
    fn repeated_nested_or_too_large_object_properties_are_malformed() {
        let block = |write: &dyn Fn(&mut PairWriter<'_>)| {
            let mut out = Vec::new();
            write(&mut PairWriter::new(&mut out));
            out
        };
        let inner = block(&|pairs| pairs.integer(PRIOR_OBJECT_GAP, 2));
        let nested = block(&|pairs| pairs.bytes(IMMUTABLE, &[]));
        let table = [
            ("none", Vec::new(), true),
            ("unknown", block(&|pairs| pairs.integer(0x70, 1)), true),
            (
                "gaps",
                block(&|pairs| (pairs.integer(PRIOR_GROUP_GAP, 7), pairs.integer(PRIOR_OBJECT_GAP, 3)).1),
                true,
            ),
            ("more groups than were", block(&|pairs| pairs.integer(PRIOR_GROUP_GAP, 8)), false),
            ("more objects than were", block(&|pairs| pairs.integer(PRIOR_OBJECT_GAP, 4)), false),
            ("twice", block(&|pairs| (0..2).for_each(|_| pairs.integer(PRIOR_GROUP_GAP, 1))), false),
            ("immutable", block(&|pairs| pairs.bytes(IMMUTABLE, &inner)), true),
            (
                "once inside, once outside",
                block(&|pairs| (pairs.bytes(IMMUTABLE, &inner), pairs.integer(PRIOR_OBJECT_GAP, 1)).1),
                false,
            ),
            ("nested", block(&|pairs| pairs.bytes(IMMUTABLE, &nested)), false),
            ("mandatory", block(&|pairs| pairs.integer(0x4000, 1)), false),
            ("cut off", vec![0x3c], false),
        ];
        for (description, block, good) in table {
            assert_eq!(check_properties(&block, 7, 3).is_ok(), good, "{description}");
        }
    }
}
