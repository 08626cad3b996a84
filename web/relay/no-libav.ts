// In the place of a decoder of Opus for browsers without one, which is under another licence than this.
throw new Error("this browser cannot decode Opus");
export {};
