/** Errors of the library have a code as in h2o.h: H2O_CANNOT_OPEN, H2O_CONTEXT_FULL, ... */

export interface ModelOptions {
  /** "auto" (the default: the CPU), "cpu", "cuda" or "cuda:N". */
  device?: string;
  /** CPU threads; 0: one per core. */
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
  /** An integer up to 2^53; random by default. */
  seed?: number;
}

export interface SessionOptions {
  /** Tokens to keep: up to 1 a fraction of the context, from 2 on a number; 0: all (full cache). */
  hh?: number;
  /** Recent tokens within hh, as a fraction of the context or a number; by default half of hh. */
  recent?: number;
  /** Part of hh: how many first tokens of the sequence are always kept. */
  sinks?: number;
  /** In tokens; by default the trained length, up to 4096. */
  context?: number;
  /** Maximum prompt tokens per step; by default 512, with CUDA 2048. */
  batch?: number;
  positions?: 'auto' | 'original' | 'rolling';
  /** Type of the cached keys: "f16" (the default), "f32", "bf16", "q8_0", "q5_0" (CPU) or "q4_0". */
  keyType?: string;
  valueType?: string;
  sampling?: Sampling;
}

export interface StreamOptions {
  /** 0: up to the end of the context; -1: no limit, where the cache allows it. */
  maxTokens?: number;
  ignoreEnd?: boolean;
  parseSpecial?: boolean;
  /** Strings that end the output and are not part of it. */
  stop?: string[];
  /** Cancels the stream after its current step; the loop then throws the signal's reason. */
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
  /** Frees the model once its sessions are closed too; may be repeated. */
  close(): void;
}

/** A sequence and its cache. During a stream, all calls except cancel() throw H2O_BUSY. */
export class Session {
  private constructor();
  /** Continues the sequence with a prompt and its output. Leaving the loop cancels the stream. */
  stream(prompt: string, options?: StreamOptions): AsyncGenerator<string, Generation, void>;
  generate(prompt: string, options?: StreamOptions): Promise<string>;
  cancel(): void;
  setSampling(options: Sampling): void;
  stats(): Stats;
  /** Positions kept by a KV head of a layer, and the scores (accumulated attention) of each. */
  kept(layer: number, head: number): { positions: Int32Array; scores: Float32Array };
  reset(): void;
  /** Cancels, waits for the stream to end, and frees the session; may be repeated. */
  close(): Promise<void>;
}
