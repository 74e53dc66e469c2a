"Files of vLLM 0.16.0 to 0.17.1, written small; the shapes of 0.15 are in the notebook kimi_eagle3."
from kimi_spec.patching.kimi_eagle3 import PATCHES

WHITELIST_017 = '''
class SpeculativeConfig:
    def check(self):
        aux_hidden_states_supported = [
            "llama",
            "qwen",  # and its kin
        ]
        if self.method in ("eagle3", "extract") and not any(
            s in self.target_model_config.hf_text_config.model_type for s in aux_hidden_states_supported
        ):
            raise ValueError(f"{self.method} is only supported for {aux_hidden_states_supported}")
'''
DEEPSEEK_017 = '''
import typing

from .interfaces import MixtureOfExperts, SupportsEagle, SupportsLoRA, SupportsPP


class DeepseekV2Model(nn.Module):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(self.config.vocab_size, self.config.hidden_size)
        self.start_layer, self.end_layer, self.layers = make_layers(self.config.num_hidden_layers, lambda p: DeepseekV2DecoderLayer(vllm_config, p), prefix)
        self.norm = RMSNorm(self.config.hidden_size)

    def embed_input_ids(self, input_ids):
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: "torch.Tensor | None", positions, intermediate_tensors, inputs_embeds=None):
        hidden_states, residual = self.embed_input_ids(input_ids), None
        llama_4_scaling = None
        # Überall gleich: the layers, one by one
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden_states, residual = layer(positions, hidden_states, residual, llama_4_scaling)

        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class DeepseekV2ForCausalLM(
    nn.Module, SupportsPP, DeepseekV2MixtureOfExperts, SupportsLoRA, SupportsEagle
):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
'''
KIMI_017 = '''
from vllm.model_executor.models.interfaces import (
    SupportsMultiModal,
    SupportsPP,
    SupportsQuant,
)


@MULTIMODAL_REGISTRY.register_processor(KimiK25MultiModalProcessor, info=KimiK25ProcessingInfo)
class KimiK25ForConditionalGeneration(
    nn.Module, SupportsMultiModal, SupportsPP, SupportsQuant
):
    def __init__(self, vllm_config, prefix=""):
        super().__init__()
        with self._mark_language_model(vllm_config):
            self.language_model = init_vllm_registered_model(vllm_config=vllm_config)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        hidden_states = self.language_model(
            input_ids=input_ids, positions=positions, intermediate_tensors=intermediate_tensors, inputs_embeds=inputs_embeds
        )

        return hidden_states
'''
LOADER = '''
def load_model(self, target_model):
    if self.get_model_name(target_model) == "Qwen":
        self.model.config.image_token_index = target_model.config.image_token_id
    else:
        self.model.config.image_token_index = target_model.config.image_token_index
'''
MEMBERS = {edit.members[-1]: patch for patch in PATCHES for edit in patch.edits}
TEXTS = dict(zip(MEMBERS, (WHITELIST_017, LOADER, DEEPSEEK_017, KIMI_017)))
STYLES = {"as written": lambda t: t, "windows": lambda t: t.replace("\n", "\r\n"), "tabs": lambda t: t.replace("    ", "\t"), "no newline at the end": lambda t: t.rstrip("\n")}
