//! Languages as catalogs name them (RFC 5646), from the codes that MP4 has (ISO 639-2).

/// ISO 639-2 codes of three letters, with the two-letter code that RFC 5646 requires instead. If ISO 639-2 has two
/// codes for a language, both are listed.
const SHORT: &str = "aar aa abk ab afr af aka ak alb sq amh am ara ar arg an arm hy asm as ava av ave ae aym ay aze az bak ba bam bm \
baq eu bel be ben bn bih bh bis bi bod bo bos bs bre br bul bg bur my cat ca ces cs cha ch che ce chi zh chu cu chv cv cor kw cos co \
cre cr cym cy cze cs dan da deu de div dv dut nl dzo dz ell el eng en epo eo est et eus eu ewe ee fao fo fas fa fij fj fin fi fra fr \
fre fr fry fy ful ff geo ka ger de gla gd gle ga glg gl glv gv gre el grn gn guj gu hat ht hau ha heb he her hz hin hi hmo ho hrv hr \
hun hu hye hy ibo ig ice is ido io iii ii iku iu ile ie ina ia ind id ipk ik isl is ita it jav jv jpn ja kal kl kan kn kas ks kat ka \
kau kr kaz kk khm km kik ki kin rw kir ky kom kv kon kg kor ko kua kj kur ku lao lo lat la lav lv lim li lin ln lit lt ltz lb lub lu \
lug lg mac mk mah mh mal ml mao mi mar mr may ms mkd mk mlg mg mlt mt mon mn mri mi msa ms mya my nau na nav nv nbl nr nde nd ndo ng \
nep ne nld nl nno nn nob nb nor no nya ny oci oc oji oj ori or orm om oss os pan pa per fa pli pi pol pl por pt pus ps que qu roh rm \
ron ro rum ro run rn rus ru sag sg san sa sin si slk sk slo sk slv sl sme se smo sm sna sn snd sd som so sot st spa es sqi sq srd sc \
srp sr ssw ss sun su swa sw swe sv tah ty tam ta tat tt tel te tgk tg tgl tl tha th tib bo tir ti ton to tsn tn tso ts tuk tk tur tr \
twi tw uig ug ukr uk urd ur uzb uz ven ve vie vi vol vo wel cy wln wa wol wo xho xh yid yi yor yo zha za zho zh zul zu";

/// Returns the tag of a language given as a code of ISO 639-2 or as a tag. Returns `None` for an unknown language.
pub(super) fn tag(code: &str) -> Option<String> {
    let code = code.trim_matches(['\0', ' ']);
    let is_tag = code.len() >= 2 && code.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    if !is_tag || matches!(code, "und" | "mis" | "zxx" | "mul") {
        return None;
    }
    let (language, rest) =
        code.split_once('-').map_or((code, None), |(language, rest)| (language, Some(rest)));
    let language = language.to_ascii_lowercase();
    let mut words = SHORT.split(' ');
    let short = std::iter::from_fn(|| Some((words.next()?, words.next()?)))
        .find_map(|(long, short)| (long == language).then(|| short.to_owned()));
    let language = short.unwrap_or(language);
    Some(rest.map_or(language.clone(), |rest| format!("{language}-{rest}")))
}

/// Reports whether a track in language `found` suits a user whose language is `wanted`. Language and region have to
/// match, but `wanted` may omit the region (RFC 4647, basic filtering).
pub(super) fn matches(found: &str, wanted: &str) -> bool {
    let (Some(found), Some(wanted)) = (tag(found), tag(wanted)) else { return false };
    let found = found.to_ascii_lowercase();
    found
        .strip_prefix(&wanted.to_ascii_lowercase())
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_letter_language_codes_become_language_tags() {
        for (code, expected) in [
            ("eng", Some("en")),
            ("deu", Some("de")),
            ("ger", Some("de")),
            ("zul", Some("zu")),
            ("aar", Some("aa")),
            ("gsw", Some("gsw")),
            ("de-AT", Some("de-AT")),
            ("deu-AT", Some("de-AT")),
            ("und", None),
            ("zxx", None),
            ("```", None),
            ("", None),
        ] {
            assert_eq!(tag(code).as_deref(), expected, "{code}");
        }
        assert!(SHORT.split(' ').count().is_multiple_of(2));
    }

    #[test]
    fn language_tag_matches_a_wanted_tag_that_is_its_prefix() {
        for (found, wanted, expected) in [
            ("de", "de", true),
            ("de-AT", "de", true),
            ("de", "ger", true),
            ("de-AT", "de-at", true),
            ("de", "de-AT", false),
            ("den", "de", false),
            ("en", "de", false),
        ] {
            assert_eq!(matches(found, wanted), expected, "{found} {wanted}");
        }
    }
}
