//! `millrace token`: makes access tokens, and checks them as a relay does.

use std::{
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use clap::{Subcommand, ValueEnum};
use millrace_relay::access::{
    Requirements, cat,
    grant::{Grant, GrantMatch, GrantScope},
    jwt::{self, JwtClaims, OneOrMany},
    keys::{self, KeyError, Signer},
    token,
};

#[derive(Debug, clap::Args)]
pub struct TokenArgs {
    #[command(subcommand)]
    command: TokenCommand,
}

#[derive(Debug, Subcommand)]
enum TokenCommand {
    /// Make a token and print it
    Make(Make),
    /// Check a token as a relay would, and print the rights that it grants
    Check(TokenCheckArgs),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum TokenFormat {
    /// JSON Web Token (JWT) with the claims of moq-relay
    Jwt,
    /// C4M, a Common Access Token (CAT) in COSE, as base64url
    C4m,
    /// C4M in the compact form of the test vectors in its draft
    C4mCompact,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("signer").required(true).args(["key", "secret"]))]
struct Make {
    /// File with a private key in PEM, or an HMAC secret as a JWK
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// File with the HMAC secret that signs or checks tokens, as raw bytes
    #[arg(long, value_name = "FILE")]
    secret: Option<PathBuf>,
    /// Format of the token
    #[arg(long, value_enum, default_value = "jwt")]
    format: TokenFormat,
    /// Path in the token; the paths of --put and --get are relative to it
    #[arg(long, value_name = "PATH", default_value = "")]
    root: String,
    /// Path under which the token may publish, repeatable
    #[arg(long, value_name = "PATH")]
    put: Vec<String>,
    /// Path under which the token may subscribe, repeatable
    #[arg(long, value_name = "PATH")]
    get: Vec<String>,
    /// Seconds until the token expires [default: never]
    #[arg(long, value_name = "SECONDS")]
    expires_in: Option<u64>,
    /// ID of the token; a relay refuses the token if the ID is in its token-revoked file
    #[arg(long)]
    id: Option<String>,
    /// Subject of the token: publishers with the same subject may publish the same track
    #[arg(long)]
    subject: Option<String>,
    /// Issuer of the token; a relay with token-issuer accepts only tokens from the issuers named there
    #[arg(long)]
    issuer: Option<String>,
    /// Audience of the token, repeatable; a relay accepts the token if its token-audience has one of them
    #[arg(long, value_delimiter = ',')]
    audience: Vec<String>,
}

#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("known").required(true).multiple(true).args(["keys", "secrets"]))]
struct TokenCheckArgs {
    /// File with keys that verify the token, in a format of a relay's token-keys, repeatable
    #[arg(long, value_name = "FILE")]
    keys: Vec<PathBuf>,
    /// File with a secret that verifies the token, in the format of a relay's token-secrets, repeatable
    #[arg(long, value_name = "FILE")]
    secrets: Vec<PathBuf>,
    /// Audience that the token must name, like a relay's token-audience, repeatable
    #[arg(long, value_delimiter = ',')]
    audience: Vec<String>,
    /// File with the token, or "-" for standard input; a token given as an argument would be visible to every user of
    /// this machine
    #[arg(value_name = "FILE", default_value = "-")]
    token: PathBuf,
}

pub fn run(args: TokenArgs) -> anyhow::Result<()> {
    match args.command {
        TokenCommand::Make(make) => self::make(make),
        TokenCommand::Check(check) => self::check(check),
    }
}

fn make(args: Make) -> anyhow::Result<()> {
    if args.put.is_empty() && args.get.is_empty() {
        bail!("the token would grant no rights: add --put or --get");
    }
    let signer = signer(&args)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let text = match args.format {
        TokenFormat::Jwt => jwt::make(&jwt_claims(args, now), &signer)?,
        TokenFormat::C4m => URL_SAFE_NO_PAD.encode(cat::make(&cat_claims(args, now), &signer, false)?),
        TokenFormat::C4mCompact => String::from_utf8(cat::make(&cat_claims(args, now), &signer, true)?)?,
    };
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

fn signer(args: &Make) -> anyhow::Result<Signer> {
    let read = |path: &PathBuf, what: fn(&[u8]) -> Result<Signer, KeyError>| {
        let name = || path.display().to_string();
        what(&std::fs::read(path).with_context(name)?).with_context(name)
    };
    match (&args.key, &args.secret) {
        (Some(key), _) => read(key, Signer::read),
        (None, Some(secret)) => read(secret, Signer::read_secret),
        (None, None) => bail!("a token needs a key: add --key or --secret"),
    }
}

fn jwt_claims(args: Make, now: u64) -> JwtClaims {
    JwtClaims {
        root: args.root,
        put: OneOrMany::Many(args.put),
        get: OneOrMany::Many(args.get),
        exp: args.expires_in.map(|seconds| now.saturating_add(seconds) as f64),
        iat: Some(now as f64),
        iss: args.issuer,
        sub: args.subject,
        aud: OneOrMany::Many(args.audience),
        jti: args.id,
        ..JwtClaims::default()
    }
}

fn cat_claims(args: Make, now: u64) -> cat::CatClaims {
    // The token's paths are those of --put and --get, appended to --root. A path permits all namespaces that begin with
    // it.
    let scope = |below: &String, publish: bool| {
        let fields = args.root.split('/').chain(below.split('/')).filter(|field| !field.is_empty());
        GrantScope {
            actions: cat::actions(publish, !publish),
            namespace: fields.map(|field| GrantMatch::Exact(field.to_owned().into())).collect(),
            closed: false,
            track: None,
        }
    };
    let put = args.put.iter().map(|below| scope(below, true));
    let scopes = put.chain(args.get.iter().map(|below| scope(below, false))).collect();
    cat::CatClaims {
        scopes,
        id: args.id,
        subject: args.subject,
        issuer: args.issuer,
        audience: args.audience,
        expires: args.expires_in.map(|seconds| now.saturating_add(seconds)),
        not_before: None,
        issued: Some(now),
    }
}

fn check(args: TokenCheckArgs) -> anyhow::Result<()> {
    let mut required = Requirements { audience: args.audience, ..Requirements::default() };
    for path in &args.keys {
        let name = || path.display().to_string();
        required.keys.extend(keys::read(&std::fs::read(path).with_context(name)?).with_context(name)?);
    }
    for path in &args.secrets {
        let name = || path.display().to_string();
        required.keys.push(keys::read_secret(&std::fs::read(path).with_context(name)?).with_context(name)?);
    }
    let credential = token::credential_from_bytes(&read(&args.token)?);
    let grant = required.check(&credential, SystemTime::now())?;
    print!("{}", describe(&grant));
    Ok(())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    if path != Path::new("-") {
        return std::fs::read(path).with_context(|| path.display().to_string());
    }
    let mut bytes = Vec::new();
    // Standard input is read up to the longest token and a line break of two bytes.
    std::io::stdin().take(token::MAX_LEN as u64 + 2).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Formats the rights that a token grants, as lines of a name and a value.
fn describe(grant: &Grant) -> String {
    let mut lines = Vec::new();
    let named = [("id", &grant.id), ("subject", &grant.subject), ("issuer", &grant.issuer)];
    for (name, value) in named {
        lines.extend(value.as_ref().map(|value| format!("{name:10} {value}")));
    }
    if !grant.audience.is_empty() {
        lines.push(format!("{:10} {}", "audience", grant.audience.join(", ")));
    }
    let left = grant.expires.map(|expires| expires.duration_since(SystemTime::now()).unwrap_or_default());
    let left = left.map(|left| format!("in {:?}", Duration::from_secs(left.as_secs())));
    lines.push(format!("{:10} {}", "expires", left.as_deref().unwrap_or("never")));
    lines.extend(grant.scopes.iter().map(|scope| format!("{:10} {}", "allows", describe_scope(scope))));
    lines.join("\n") + "\n"
}

fn describe_scope(scope: &GrantScope) -> String {
    let text = |field: &GrantMatch| match field {
        GrantMatch::Exact(bytes) => bytes.escape_ascii().to_string(),
        GrantMatch::Prefix(bytes) => format!("{}*", bytes.escape_ascii()),
        GrantMatch::Suffix(bytes) => format!("*{}", bytes.escape_ascii()),
    };
    let mut fields: Vec<_> = scope.namespace.iter().map(text).collect();
    if !scope.closed {
        fields.push("**".to_owned());
    }
    let track = scope.track.as_ref().map(|track| format!(", track {}", text(track))).unwrap_or_default();
    format!("{} in {}{track}", scope.actions, fields.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(format: TokenFormat, key: &Path) -> Make {
        Make {
            key: None,
            secret: Some(key.to_owned()),
            format,
            root: "room".into(),
            put: vec!["alice".into()],
            get: vec![String::new()],
            expires_in: Some(60),
            id: Some("7".into()),
            subject: None,
            issuer: None,
            audience: vec!["relay".into()],
        }
    }

    #[test]
    fn new_token_is_valid_and_lists_its_rights() {
        let dir = tempfile::tempdir().unwrap();
        let key = dir.path().join("key");
        std::fs::write(&key, [b'k'; 32]).unwrap();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let required = Requirements {
            keys: vec![keys::read_secret(&[b'k'; 32]).unwrap()],
            audience: vec!["relay".into()],
            ..Requirements::default()
        };
        for format in TokenFormat::value_variants() {
            let args = args(*format, &key);
            let signer = signer(&args).unwrap();
            let text = match format {
                TokenFormat::Jwt => jwt::make(&jwt_claims(args, now), &signer).unwrap(),
                TokenFormat::C4m => {
                    URL_SAFE_NO_PAD.encode(cat::make(&cat_claims(args, now), &signer, false).unwrap())
                }
                TokenFormat::C4mCompact => {
                    String::from_utf8(cat::make(&cat_claims(args, now), &signer, true).unwrap()).unwrap()
                }
            };
            let credential = token::credential_from_bytes(format!("{text}\n").as_bytes());
            let said = describe(&required.check(&credential, SystemTime::now()).unwrap());
            for line in [
                "id         7",
                "audience   relay",
                "PUBLISH_NAMESPACE, REQUEST_UPDATE, PUBLISH in room/alice/**",
                "FETCH, TRACK_STATUS in room/**",
            ] {
                assert!(said.contains(line), "{format:?}: {line} is not in\n{said}");
            }
        }
    }

    #[test]
    fn file_of_the_wrong_kind_is_refused_as_key_or_secret() {
        use rcgen::PublicKeyData as _;

        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let secret = file("secret", &[b'k'; 32]);
        let der = file("public.der", &rcgen::KeyPair::generate().unwrap().subject_public_key_info());
        let as_key =
            |path: &Path| Make { key: Some(path.to_owned()), secret: None, ..args(TokenFormat::Jwt, path) };
        for (args, path, wanted) in [
            (as_key(&secret), &secret, "neither PEM nor JSON"),
            (as_key(&der), &der, "it is DER"),
            (args(TokenFormat::Jwt, &der), &der, "it is DER, and no secret"),
        ] {
            let error = format!("{:#}", signer(&args).err().unwrap());
            assert!(error.contains(wanted) && error.starts_with(path.to_str().unwrap()), "{error}");
        }
        assert!(signer(&args(TokenFormat::Jwt, &secret)).is_ok());
    }
}
