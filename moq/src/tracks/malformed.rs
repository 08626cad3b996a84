//! What shows that a track is malformed (draft-18, "Malformed Tracks").
//!
//! Found is what a relay reads anyway: copies of a subgroup that it has are not read, so that nothing is found in them.

use crate::{
    DecodeError,
    property::{Pair, Pairs, Value},
};

/// Why a track is malformed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

impl From<DecodeError> for Malformed {
    fn from(error: DecodeError) -> Self {
        Self(error.reason)
    }
}

/// What is known of a group's objects.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    largest: Option<u64>,
    /// The final object, once that is known.
    last: Option<u64>,
}

impl Known {
    /// An object has come; `ends`: it is the group's final one.
    ///
    /// # Errors
    /// It is behind the final one, or another than that is final.
    pub fn take(&mut self, id: u64, ends: bool) -> Result<(), Malformed> {
        if self.last.is_some_and(|last| id > last) {
            return Err(Malformed("an object behind the last of its group"));
        }
        if ends && self.largest.is_some_and(|largest| largest > id) {
            return Err(Malformed("the end of a group, and objects behind it have come"));
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
/// Of tracks only.
const MANDATORY: std::ops::RangeInclusive<u64> = 0x4000..=0x7fff;

/// Checks the properties of an object.
///
/// # Errors
/// They cannot be an object's, or not this one's.
pub fn check_properties(block: &[u8], group: u64, object: u64) -> Result<(), Malformed> {
    if block.is_empty() {
        return Ok(());
    }
    let mut seen = Seen { group, object, immutable: false, group_gap: false, object_gap: false };
    Pairs::new(block).try_for_each(|pair| seen.take(pair?, true))
}

/// What may be there once.
struct Seen {
    group: u64,
    object: u64,
    immutable: bool,
    group_gap: bool,
    object_gap: bool,
}

impl Seen {
    fn take(&mut self, pair: Pair<'_>, outside: bool) -> Result<(), Malformed> {
        match (pair.kind, pair.value) {
            (IMMUTABLE, _) if !outside => Err(Malformed("immutable properties inside immutable ones")),
            (IMMUTABLE, Value::Bytes(block)) => {
                once(&mut self.immutable, "immutable properties twice")?;
                Pairs::new(block).try_for_each(|pair| self.take(pair?, false))
            }
            (PRIOR_GROUP_GAP, Value::Integer(gap)) => {
                once(&mut self.group_gap, "a gap of groups twice")?;
                fits(gap, self.group, "a gap of more groups than there were")
            }
            (PRIOR_OBJECT_GAP, Value::Integer(gap)) => {
                once(&mut self.object_gap, "a gap of objects twice")?;
                fits(gap, self.object, "a gap of more objects than there were")
            }
            (kind, _) if MANDATORY.contains(&kind) => {
                Err(Malformed("a mandatory track property on an object"))
            }
            _ => Ok(()),
        }
    }
}

fn once(seen: &mut bool, twice: &'static str) -> Result<(), Malformed> {
    if std::mem::replace(seen, true) { Err(Malformed(twice)) } else { Ok(()) }
}

fn fits(gap: u64, id: u64, more: &'static str) -> Result<(), Malformed> {
    if gap > id { Err(Malformed(more)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::property::PairWriter;

    #[test]
    fn properties_of_objects() {
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
