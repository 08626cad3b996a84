// Describes for users which parts of a broadcast this browser cannot play.

import type MoqWatch from "@moq/watch/element";

type Catalog = NonNullable<MoqWatch["catalog"]>;
type Probe<Config> = ((config: Config) => Promise<boolean>) | undefined;

const NOTHING = "The catalog of this broadcast has neither pictures nor sound for a page: they may be encrypted, or of another kind.";
const LOC_BY_MSF = "The catalog of this broadcast describes LOC by MSF alone, which this page's player does not read.";

/** Returns the reason why the picture, the sound or both cannot be played in this browser, or `undefined` if all can. */
export async function hinders(watch: MoqWatch, catalog: Catalog): Promise<string | undefined> {
  const renditions = Object.values({ ...catalog.video?.renditions, ...catalog.audio?.renditions });
  if (renditions.length === 0) return NOTHING;
  // The player reports the container "legacy" for renditions in an MSF catalog that are not CMAF.
  if (watch.catalogFormat === "msf" && renditions.every(({ container }) => container.kind === "legacy")) return LOC_BY_MSF;
  const pictures = await refused(catalog.video?.renditions, watch.video.source.in.supported.peek());
  const sounds = await refused(catalog.audio?.renditions, watch.audio.source.in.supported.peek());
  const parts = [...named("the picture", pictures), ...named("the sound", sounds)];
  return parts.length > 0 ? `This browser does not decode ${parts.join(" and ")} of this broadcast.` : undefined;
}

/** Returns the codecs of the renditions, or no codecs if this browser decodes at least one of them. */
async function refused<Config extends { codec: string }>(renditions: Record<string, Config> = {}, probe: Probe<Config>): Promise<string[]> {
  const all = Object.values(renditions);
  // Browsers throw an error for the name of a codec that they do not know.
  const answers = await Promise.all(all.map(async (config) => probe?.(config).catch(() => false)));
  return answers.some(Boolean) ? [] : [...new Set(all.map(({ codec }) => codec))];
}

function named(what: string, codecs: string[]): string[] {
  return codecs.length > 0 ? [`${what} (${codecs.join(", ")})`] : [];
}
