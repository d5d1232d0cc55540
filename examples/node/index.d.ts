/** Errors of the library have a code: H2O_CANNOT_OPEN, H2O_CONTEXT_FULL, ... as in h2o.h. */

export interface ModelOptions {
  /** "cpu" (the default), "cuda" or "cuda:N". */
  device?: string;
  /** Of the CPU; 0: one for each core. */
  threads?: number;
}

export interface ModelInfo {
  readonly architecture: string;
  readonly backend: string;
  readonly vocabulary: number;
  readonly trainedContext: number;
  readonly layers: number;
  readonly kvHeads: number;
}

export interface Sampling {
  /** 0: greedy. */
  temperature?: number;
  topK?: number;
  topP?: number;
  minP?: number;
  repeatPenalty?: number;
  repeatLastN?: number;
  /** Up to 2^53; without it texts differ each time. */
  seed?: number;
}

export interface SessionOptions {
  /** What the cache keeps: up to 1 a fraction of the context, from 2 on tokens; 0: everything. */
  hh?: number;
  /** How much of hh is recent tokens, likewise; the default is half of it. */
  recent?: number;
  /** How many first tokens are kept besides. */
  sinks?: number;
  /** In tokens; the default is as trained, up to 4096. */
  context?: number;
  /** Prompt tokens that are read at a time. */
  batch?: number;
  positions?: 'auto' | 'original' | 'rolling';
  /** Of the cached keys: "f16" (the default), "f32", "bf16", "q8_0" or "q4_0". */
  keyType?: string;
  valueType?: string;
  sampling?: Sampling;
}

export interface StreamOptions {
  /** 0: up to the end of the context; -1: until the model ends. */
  maxTokens?: number;
  ignoreEnd?: boolean;
  parseSpecial?: boolean;
  /** Strings that end the text, and are not part of it. */
  stop?: string[];
  /** Ends the stream after its current step; the loop then throws the signal's reason. */
  signal?: AbortSignal;
}

export interface Generation {
  finish: 'stop' | 'length' | 'cancelled';
  promptTokens: number;
  generatedTokens: number;
  promptSeconds: number;
  decodeSeconds: number;
}

export interface Stats {
  tokens: number;
  kept: number;
  evicted: number;
  context: number;
  room: number;
  cacheBytes: number;
  fullCacheBytes: number;
}

export class Model {
  private constructor();
  static open(path: string, options?: ModelOptions): Promise<Model>;
  readonly info: ModelInfo;
  session(options?: SessionOptions): Promise<Session>;
  tokenize(text: string): Int32Array;
  /** Frees it once its sessions are closed too. */
  close(): void;
}

/** A sequence of tokens, and its cache. While it streams other calls but cancel() throw H2O_BUSY. */
export class Session {
  private constructor();
  /** Goes on after what was streamed before. Leaving the loop ends it. */
  stream(prompt: string, options?: StreamOptions): AsyncGenerator<string, Generation, void>;
  generate(prompt: string, options?: StreamOptions): Promise<string>;
  cancel(): void;
  setSampling(options: Sampling): void;
  stats(): Stats;
  /** The positions that a KV head of a layer keeps, and the attention that each has received. */
  kept(layer: number, head: number): { positions: Int32Array; scores: Float32Array };
  reset(): void;
  /** Cancels, waits and frees. */
  close(): Promise<void>;
}
